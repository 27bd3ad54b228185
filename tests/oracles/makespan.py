"""List schedules and critical paths with plain loops and dicts.

A task is a dict: `duration`, `after`, `streams`, `resources`, `priority` (larger first); tasks are
a dict by name whose order breaks the last ties.
"""


def remaining(tasks):
    """Longest path from the start of each task to the end of everything."""
    found = {}

    def left(name):
        if name not in found:
            longest = 0.0
            for other, task in tasks.items():
                if name in task["after"]:
                    longest = max(longest, left(other))
                if name in task["streams"]:
                    longest = max(longest, left(other) - task["duration"])
            found[name] = tasks[name]["duration"] + longest
        return found[name]

    return {name: left(name) for name in tasks}


def list_schedule(tasks):
    """(start, end) by name: the task that can start first goes next."""
    left, names = remaining(tasks), list(tasks)
    start, end, free = {}, {}, {}
    while len(end) < len(tasks):
        choices = []
        for name, task in tasks.items():
            if name in end or any(other not in end for other in task["after"] + task["streams"]):
                continue
            earliest = max([0.0, *(end[other] for other in task["after"])])
            if task["duration"] > 0:
                earliest = max([earliest, *(free.get(r, 0.0) for r in task["resources"])])
            choices.append((earliest, -task["priority"], -left[name], names.index(name), name))
        earliest, *_, name = min(choices)
        task = tasks[name]
        start[name] = earliest
        end[name] = max([earliest + task["duration"], *(end[o] for o in task["streams"])])
        if task["duration"] > 0:
            free |= {r: max(free.get(r, 0.0), end[name]) for r in task["resources"]}
    return start, end


def fine(tasks, phase):
    """Makespan where tasks of a phase overlap ideally. `phase` names that of each task."""
    members = {}
    for name in tasks:
        members.setdefault(phase[name], []).append(name)

    def load(names):
        per = {}
        for name in names:
            for r in tasks[name]["resources"]:
                per[r] = per.get(r, 0.0) + tasks[name]["duration"]
        return per

    alone = lambda names: [tasks[n]["duration"] for n in names if not tasks[n]["resources"]]
    takes = {p: max([0.0, *load(names).values(), *alone(names)]) for p, names in members.items()}

    def ends(p):
        waits = {phase[o] for n in members[p] for o in tasks[n]["after"] + tasks[n]["streams"]}
        return takes[p] + max([0.0, *(ends(q) for q in waits - {p})])

    return max([*(ends(p) for p in members), *load(tasks).values()])
