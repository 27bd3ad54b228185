"""The scan: every command at the earliest time that its resources allow."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Bool, Int, IntLike, IntScalar
from moejax.cost.dram._timing import (
    ACROSS,
    ACT,
    GROUP,
    GWRITE,
    MAC,
    NEVER,
    OTHER,
    PRE,
    RD,
    RDRES,
    SAME,
    SYNC,
    WR,
    Clocks,
)


ALL, EVEN, ODD = -1, -2, -3
# Targets from here down are one bank in each of the four groups: bank `FOUR - target` of them.
FOUR = -4
BANK_GROUPS = 4


class Stream(eqx.Module):
    """Commands of one pseudo-channel, in program order.

    Fields, all [commands] int32: `kind` (`ACT`, `RD`, `WR`, `PRE`, `MAC`, `GWRITE`, `RDRES`,
    `SYNC`, `NOP`); `count`, how many of them in a row (for `SYNC`, clocks to wait beyond the end of
    all that went before); `target`, a bank or `ALL`, `EVEN`, `ODD`, or one bank of each group from
    `FOUR` down; `buffer`, 1 for the row buffers of PIM where there are two sets.
    """

    kind: Int[Array, " commands"]
    count: Int[Array, " commands"]
    target: Int[Array, " commands"]
    buffer: Int[Array, " commands"]


class Issued(NamedTuple):
    """When the commands of a stream went out, in clocks; -1 for what did not happen.

    `first`, `last`: of the run. `before`: how many of it came before the refresh that broke it.
    `break_last`: the last of those, `resume`: the first after it. `open_1`, `open_2`: the activate
    that a closed row needed, before the run and after the refresh. `precharge`, `refresh`: closing
    all rows, and the refresh itself. All [commands] int32. `done`: the end of everything, scalar;
    `done_after`: the same after each command.
    """

    first: Int[Array, " commands"]
    last: Int[Array, " commands"]
    before: Int[Array, " commands"]
    break_last: Int[Array, " commands"]
    resume: Int[Array, " commands"]
    open_1: Int[Array, " commands"]
    open_2: Int[Array, " commands"]
    precharge: Int[Array, " commands"]
    refresh: Int[Array, " commands"]
    done_after: Int[Array, " commands"]
    done: IntScalar


class _State(NamedTuple):
    earliest: Int[Array, "kinds banks"]
    is_open: Bool[Array, " banks"]
    recent: Int[Array, " four"]  # the last four activates that count for the window, oldest first
    floor: IntScalar
    done: IntScalar
    due: IntScalar


class _Plan(NamedTuple):
    """Where a command would go now."""

    activates: Bool[Array, " banks"]
    any_activate: Array
    activate_at: IntScalar
    at: IntScalar
    happens: Array


class _Layout(NamedTuple):
    """Static: which bank, group and set of row buffers each column of the state is."""

    bank: np.ndarray
    side: np.ndarray
    place: np.ndarray  # of the bank in its group
    same_group: np.ndarray


def _layout(num_banks: int, num_groups: int, dual: bool) -> _Layout:
    index = np.arange(num_banks * (2 if dual else 1))
    bank, side = index % num_banks, index // num_banks
    group = side * num_groups + bank // (num_banks // num_groups)
    place = bank % (num_banks // num_groups)
    return _Layout(bank, side, place, group[:, None] == group[None, :])


def issue(
    stream: Stream,
    clocks: Clocks,
    *,
    num_banks: int,
    num_groups: int = BANK_GROUPS,
    dual: bool = False,
    first_refresh: IntLike | None = None,
    breaks_runs: bool = True,
) -> Issued:
    """Issues a stream. One configuration; batches by `jax.vmap` over stream and clocks.

    A command goes out at the earliest time that bank, bank group, data bus, activation window and
    the commands before it on those allow; it does not wait for unrelated commands that stand
    before it. A column command to a closed row activates first; an activate of an open row and a
    precharge of a closed one do nothing. Runs of one command keep their cadence, so that the length
    of the scan is the number of runs.

    Refresh: the first row command at or after the due time is preceded by a precharge of all banks
    and a refresh; with `breaks_runs` a run is broken there, without it ends first. Refreshes missed
    while no row was used cost nothing.

    **Arguments:**

    - `stream`: `Stream`. Runs of `RD`, `WR` and `MAC` must be shorter than a refresh interval.
    - `clocks`: from `in_clocks`.
    - `num_banks`, `num_groups`: static; banks that behave alike may be modeled by one of them.
    - `dual`: static; whether PIM has row buffers of its own.
    - `first_refresh`: clock at which the first refresh is due, traced; `None` for no refresh.
    - `breaks_runs`: static.

    **Returns:** `Issued`.
    """
    layout = _layout(num_banks, num_groups, dual)
    width = layout.bank.shape[0]
    start = _State(
        earliest=jnp.zeros((7, width), jnp.int32),
        is_open=jnp.zeros(width, bool),
        recent=jnp.full(4, NEVER, jnp.int32),
        floor=jnp.int32(0),
        done=jnp.int32(0),
        due=jnp.asarray(2**30 if first_refresh is None else first_refresh, jnp.int32),
    )
    policy = "none" if first_refresh is None else ("break" if breaks_runs else "wait")
    step = lambda state, command: _step(state, command, clocks, layout, policy)
    commands = (stream.kind, stream.count, stream.target, stream.buffer)
    end, out = jax.lax.scan(step, start, commands)
    return Issued(**out, done=end.done)


def _step(state: _State, command, c: Clocks, layout: _Layout, policy: str):
    kind, count, target, buffer = command
    is_sync, is_real = kind == SYNC, kind < SYNC
    state = state._replace(
        floor=jnp.where(is_sync, jnp.maximum(state.floor, state.done + count), state.floor),
        done=jnp.where(is_sync, state.done + count, state.done),
    )
    kind = jnp.where(is_real, kind, PRE)
    chosen = _chosen(layout, target, buffer)
    chosen &= state.is_open | (kind != PRE)
    bankless = (kind == GWRITE) | (kind == RDRES)
    relation = _relation(layout, chosen, bankless)
    cadence = _cadence(c, kind, target, bankless)
    count = jnp.where(is_real, count, 0)
    args = (kind, target, chosen, bankless, c)
    placed = (kind, target, chosen, relation, c, layout)
    none = jnp.int32(-1)

    plan = _plan(state, *args)
    happens = plan.happens & (count > 0)
    if policy == "none":
        last = plan.at + (count - 1) * cadence
        state = _commit(state, plan, happens, last, *placed)
        out = _record(plan, happens, last)
        quiet = dict(before=jnp.where(happens, count, 0), break_last=out["last"], resume=none)
        quiet |= dict(open_2=none, precharge=none, refresh=none)
        return state, out | quiet | dict(done_after=state.done)

    uses_row = (kind == ACT) | (kind == RD) | (kind == WR) | (kind == MAC)
    event = jnp.where(plan.any_activate, plan.activate_at, plan.at)
    fits = count
    if policy == "break":
        fits = -((plan.at - state.due) // jnp.maximum(cadence, 1))
    before = jnp.where(event < state.due, jnp.clip(fits, 0, count), 0)
    before = jnp.where(uses_row & happens, before, jnp.where(happens, count, 0))
    last = plan.at + (before - 1) * cadence
    first_part = happens & (before > 0)
    state = _commit(state, plan, first_part, last, *placed)

    broken = happens & (before < count)
    state, precharge, refresh = _refresh(state, broken, event, c)
    again = _plan(state, *args)
    final = again.at + (count - before - 1) * cadence
    state = _commit(state, again, broken & again.happens, final, *placed)
    out = dict(
        first=jnp.where(first_part, plan.at, jnp.where(broken, again.at, none)),
        last=jnp.where(broken, final, jnp.where(first_part, last, none)),
        before=before,
        break_last=jnp.where(first_part, last, none),
        resume=jnp.where(broken, again.at, none),
        open_1=jnp.where(first_part & plan.any_activate, plan.activate_at, none),
        open_2=jnp.where(broken & again.any_activate, again.activate_at, none),
        precharge=precharge,
        refresh=refresh,
        done_after=state.done,
    )
    return state, out


def _record(plan: _Plan, happens: Array, last: IntScalar) -> dict[str, Array]:
    none = jnp.int32(-1)
    return dict(
        first=jnp.where(happens, plan.at, none),
        last=jnp.where(happens, last, none),
        open_1=jnp.where(happens & plan.any_activate, plan.activate_at, none),
    )


def _chosen(layout: _Layout, target: IntScalar, buffer: IntScalar) -> Bool[Array, " banks"]:
    bank, side = jnp.asarray(layout.bank), jnp.asarray(layout.side)
    hit = (target == ALL) | (target == bank)
    hit |= (target == EVEN) & (bank % 2 == 0) | (target == ODD) & (bank % 2 == 1)
    hit |= (target <= FOUR) & (jnp.asarray(layout.place) == FOUR - target)
    return hit & (side == buffer) if layout.side.max() > 0 else hit


def _relation(layout: _Layout, chosen: Bool[Array, " banks"], bankless: Array):
    """How each bank stands to the chosen ones."""
    grouped = jnp.any(jnp.asarray(layout.same_group) & chosen[None, :], axis=1)
    side = jnp.asarray(layout.side)
    our_side = jnp.max(jnp.where(chosen, side, 0))
    apart = jnp.where(side == our_side, OTHER, ACROSS)
    relation = jnp.where(chosen, SAME, jnp.where(grouped, GROUP, apart))
    return jnp.where(bankless, OTHER, relation)


def _cadence(c: Clocks, kind: IntScalar, target: IntScalar, bankless: Array) -> IntScalar:
    """Distance of equal commands in a run; over four groups, a quarter of the one in a group."""
    own = c.gap[kind, kind]
    four = jnp.maximum(own[OTHER], -(-own[GROUP] // BANK_GROUPS))
    return jnp.where(bankless, own[OTHER], jnp.where(target <= FOUR, four, own[SAME]))


def _plan(state: _State, kind, target, chosen, bankless, c: Clocks) -> _Plan:
    column = (kind == RD) | (kind == WR) | (kind == MAC)
    activates = chosen & ~state.is_open & (column | (kind == ACT))
    any_activate = jnp.any(activates)
    multiple, exempt = target < 0, (target < 0) & (target > FOUR) & ~c.limited
    window = jnp.where(multiple, state.recent[3], state.recent[0]) + c.faw
    activate_at = jnp.max(jnp.where(activates, state.earliest[ACT], NEVER))
    activate_at = jnp.maximum(activate_at, jnp.where(exempt, NEVER, window))
    activate_at = jnp.maximum(activate_at, state.floor)

    # What the activate allows, if there is one: its own gap on top of the rest.
    opened = activate_at + _spread(c, target) + c.gap[ACT, kind, SAME]
    touched = chosen | bankless
    at = jnp.max(jnp.where(touched, state.earliest[kind], NEVER))
    at = jnp.maximum(at, jnp.where(any_activate & column, opened, NEVER))
    at = jnp.where(kind == ACT, activate_at, jnp.maximum(at, state.floor))
    happens = jnp.where(kind == ACT, any_activate, jnp.any(touched))
    return _Plan(activates, any_activate, activate_at, at, happens)


def _spread(c: Clocks, target: IntScalar) -> IntScalar:
    """From the first to the last of the banks that one activate opens."""
    return jnp.where(target >= 0, 0, jnp.where(target <= FOUR, c.few_spread, c.spread))


def _commit(state: _State, plan: _Plan, happens, last, kind, target, chosen, relation, c, layout):
    opens = happens & plan.any_activate
    spread = _spread(c, target)
    opened = _relation(layout, plan.activates, jnp.bool_(False))
    after = plan.activate_at + spread + c.gap[ACT][:, opened]
    earliest = jnp.where(opens, jnp.maximum(state.earliest, after), state.earliest)
    exempt = (target < 0) & (target > FOUR) & ~c.limited
    counted = plan.activate_at + spread
    one = jnp.concatenate([state.recent[1:], counted[None]])
    recent = jnp.where(target < 0, counted, one)
    recent = jnp.where(opens & ~exempt, recent, state.recent)

    moves = happens & (kind != ACT)
    after = last + c.gap[kind][:, relation]
    earliest = jnp.where(moves, jnp.maximum(earliest, after), earliest)
    is_open = (state.is_open | (plan.activates & opens)) & ~(chosen & moves & (kind == PRE))
    finished = jnp.maximum(state.done, last + c.complete[kind])
    done = jnp.where(happens, finished, state.done)
    return state._replace(earliest=earliest, is_open=is_open, recent=recent, done=done)


def _refresh(state: _State, broken: Array, event: IntScalar, c: Clocks):
    missed = jnp.maximum(event - state.due, 0) // c.refi
    due = state.due + missed * c.refi
    any_open = jnp.any(state.is_open)
    close = jnp.max(jnp.where(state.is_open, state.earliest[PRE], NEVER))
    close = jnp.maximum(jnp.maximum(close, due), state.floor)
    reopen = close + c.gap[PRE, ACT, SAME]
    ready = jnp.where(state.is_open, jnp.maximum(state.earliest[ACT], reopen), state.earliest[ACT])
    start = jnp.maximum(jnp.max(ready) - c.early_refresh, jnp.maximum(due, state.floor))
    ready = jnp.maximum(ready, start + c.rfc)
    new = state._replace(
        earliest=state.earliest.at[ACT].set(ready),
        is_open=jnp.zeros_like(state.is_open),
        due=due + c.refi,
    )
    state = jax.tree.map(lambda a, b: jnp.where(broken, a, b), new, state)
    none = jnp.int32(-1)
    precharge = jnp.where(broken & any_open, close, none)
    return state, precharge, jnp.where(broken, start, none)
