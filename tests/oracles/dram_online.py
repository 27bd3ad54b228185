"""Deciding from a table that learns, one layer after the other in plain Python."""

from tests.oracles import partition
from tests.oracles.pim_cost_table import DictTable


def run_online(counts, costs, truth, phases, fallback, beta, learns):
    """(totals, known totals, final lookup table, on GPU) of every iteration and layer.

    `counts`, `phases`: [iterations][layers][experts]; `truth`: [phases][counts].
    """
    most = len(fallback) - 1
    mean = [sum(row[n] for row in truth) / len(truth) for n in range(most + 1)]
    table = DictTable(most, fallback, beta)
    totals, known, chosen = [], [], []
    for batch, phase in zip(counts, phases):
        timed = []
        believed = [table.lookup(n) for n in range(most + 1)]
        for layer, layer_phase in zip(batch, phase):
            on_gpu, _ = partition.sieve(layer, costs | dict(pim_time_by_tokens=believed))
            true = costs | dict(pim_time_by_tokens=mean)
            totals.append(partition.total_time(on_gpu, layer, true)[0])
            known.append(min(partition.prefix_totals(layer, true)))
            chosen.append(on_gpu)
            for n, p, gpu in zip(layer, layer_phase, on_gpu):
                timed.append((n, truth[p][n], n > 0 and not gpu))
        if learns:
            table.update(*zip(*timed))
    return totals, known, [table.lookup(n) for n in range(most + 1)], chosen
