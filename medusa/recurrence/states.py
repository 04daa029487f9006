"""What recurrent layers keep of each text between two passes.

A state cannot be cut back to a shorter text. So a layer keeps, for each text, its state *before* the rows of the last
pass, and the inputs of these rows. At the next pass it is known how many of the rows were accepted, and which; only
these are applied to the state. A rejected draft never reaches it, and a pass that fails changes nothing: the text is
the length that its sequence has. If the rows were a chain and all are accepted (a prompt's, or a plain step's), the
state after them is there already.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.attention.contract import TreePlan
from medusa.recurrence.rules import convolve, recur

MOST_SAVED = 16
"""Places at which states are saved for other texts. A place costs as much memory as one more running text."""

Advance = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""State and the inputs [R, ...] of rows that follow each other -> the state after them."""


class StatesLostError(RuntimeError):
    """The state of a text is needed at a length at which no state is kept."""


class Kept(NamedTuple):
    """What one part of a layer keeps of a text.

    Attributes:
        length: Number of positions that the state has seen.
        state: The state after them.
        rows: The inputs [R, ...] of the next pass's rows.
        size: R.
        end: The state after all of these rows, if they are a chain.
    """

    length: int
    state: Tensor
    rows: tuple[Tensor, ...] = ()
    size: int = 0
    end: Tensor | None = None

    def after(self, length: int) -> Tensor | None:
        """The state after exactly this many positions, if it is there already."""
        if length == self.length:
            return self.state
        return self.end if length == self.length + self.size else None


class RecurrentStates:
    """The states of all recurrent layers, for the texts of a pool. A text is the line of its sequence in the table.

    Attributes:
        saved: States after the last position of blocks, by their numbers in the index; the last used come last.
    """

    def __init__(self) -> None:
        self._kept: dict[int, dict[object, Kept]] = {}  # by text, then by layer and part
        self._paths: dict[int, list[int]] = {}  # the accepted rows of a text's last pass, if they are not its first
        self.saved: OrderedDict[int, dict[object, Kept]] = OrderedDict()

    @contextmanager
    def running(self, plan: TreePlan) -> Iterator[None]:
        """Lets the recurrent layers of this pass read and keep states."""
        plan.recurrent = RecurrentPass(self, plan)
        yield
        for text, _ in plan.texts:
            self._paths.pop(text, None)

    def accept(self, texts: Sequence[tuple[int, int]], path_SA: Tensor, counts_S: Tensor) -> None:
        """Note which rows of the last pass each of these texts has accepted; see ``medusa.cache.commit``."""
        for (text, _), path, count in zip(texts, path_SA.tolist(), counts_S.tolist(), strict=False):
            self._paths[text] = path[:count]

    def settle(self, text: int, length: int) -> None:
        """Free the inputs of a chain's rows, all of which the text of this length has accepted."""
        mine = self._kept.get(text, {})
        for part, kept in mine.items():
            if kept.end is not None and kept.length + kept.size == length:
                mine[part] = Kept(length, kept.end)

    def before(self, text: int, part: object, length: int, advance: Advance) -> Tensor | None:
        """The state of a part of a layer after the first ``length`` positions of a text; None = there are none yet.

        Raises:
            StatesLostError: There is no such state.
        """
        kept, path = self.reach(text, part, length)
        if kept is None or not path:
            return None if kept is None else kept.state
        return advance(kept.state, [rows[torch.tensor(path, device=rows.device)] for rows in kept.rows])

    def reach(self, text: int, part: object, length: int) -> tuple[Kept | None, list[int]]:
        """What is kept, and which of its rows lead to the state after ``length`` positions; see ``before``."""
        kept = self._kept.get(text, {}).get(part)
        if kept is None and length == 0:
            return None, []
        if kept is None or not kept.length <= length <= kept.length + kept.size:
            raise StatesLostError(
                f"recurrent layers have no state of this text after {length} tokens; compute it from its beginning"
            )
        if (state := kept.after(length)) is not None:
            return Kept(length, state), []
        accepted = length - kept.length
        return kept, self._paths.get(text, list(range(accepted)))[:accepted]

    def keep(self, text: int, part: object, kept: Kept) -> None:
        """Keep this of a text."""
        self._kept.setdefault(text, {})[part] = kept

    def save(self, text: int, length: int, entry: int) -> None:
        """Save the states after exactly ``length`` positions, if they are there, for texts that begin in the same way.

        Args:
            text: The text.
            length: Positions up to the end of a block.
            entry: Number of that block in the index.
        """
        found: dict[object, Kept] = {}
        for part, kept in self._kept.get(text, {}).items():
            if (state := kept.after(length)) is None:
                return
            found[part] = Kept(length, state)
        if found:
            self.saved[entry] = found
            self.saved.move_to_end(entry)
            if len(self.saved) > MOST_SAVED:
                self.saved.popitem(last=False)

    def begin(self, text: int, entry: int) -> None:
        """Begin a text with the states that are saved for this block, if the model keeps any."""
        if entry in self.saved:
            self._kept[text] = dict(self.saved[entry])
            self.saved.move_to_end(entry)

    def drop(self, text: int) -> None:
        """Forget a text that has ended."""
        self._kept.pop(text, None)
        self._paths.pop(text, None)

    @contextmanager
    def provisional(self, text: int) -> Iterator[None]:
        """A context after which this text is as before; nothing is copied, since states are never changed."""
        kept, path = dict(self._kept.get(text, {})), self._paths.get(text)
        try:
            yield
        finally:
            self.drop(text)
            self._kept[text] = kept
            if path is not None:
                self._paths[text] = path


class RecurrentPass:
    """What recurrent layers do in one pass, for all of its trees.

    Attributes:
        layer: Index of the layer that computes now.
    """

    def __init__(self, states: RecurrentStates, plan: TreePlan) -> None:
        self._states, self._plan = states, plan
        self.layer = 0

    @cached_property
    def chains(self) -> list[bool]:
        """Whether the rows of each text follow each other."""
        plan = self._plan
        chains = [draft.straight for draft in plan.drafts for _ in draft.row_sizes]
        return [chain or size == 1 for chain, size in zip(chains, plan.sizes, strict=True)]

    @cached_property
    def _groups(self) -> list[list[int]]:
        """The texts that are computed together: all, if their trees have one size and are or are not chains."""
        every, alike = list(range(len(self._plan.sizes))), self._plan.uniform is not None
        return [every] if alike and len(set(self.chains)) == 1 else [[index] for index in every]

    def convolve(self, rows_RC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, silu: bool) -> Tensor:
        """The causal convolution [R, C] of the rows, each behind its ancestors and the text before them."""
        width = weight_CW.shape[1] - 1
        windows = self.windows(width, rows_RC)
        self.keep_inputs(windows, rows_RC)
        taken_RW = self.taken(width).to(rows_RC.device)
        return convolve(torch.cat([*windows, rows_RC]), taken_RW, weight_CW, bias_C, silu)

    def windows(self, width: int, like_RC: Tensor) -> list[Tensor]:
        """The last inputs [width, C] of the layer's convolution before the rows of each text."""
        found = []
        for text, length in self._plan.texts:
            window = self._states.before(text, (self.layer, "convolution"), length, _move_window)
            found.append(like_RC.new_zeros(width, like_RC.shape[1]) if window is None else window)
        return found

    def keep_inputs(self, windows: Sequence[Tensor], rows_RC: Tensor) -> None:
        """Keep what the layer's convolution has read: ``windows``, and the inputs of the rows."""
        part = self.layer, "convolution"
        for index, (window, own) in enumerate(zip(windows, rows_RC.split(self._plan.sizes), strict=True)):
            self._keep(index, part, window, (own,), _move_window(window, [own]) if self.chains[index] else None)

    def taken(self, width: int) -> Tensor:
        """[R, width + 1] int64 indices of each row's inputs: windows of all texts come first, then all rows."""
        return self._plan.once(("convolution", width), lambda: self._taken(width))

    def recur(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None) -> Tensor:
        """Outputs [R, H, V] of the rows, see ``rules.recur``.

        Args:
            query: [R, Hk, K].
            key: [R, Hk, K].
            value: [R, H, V].
            decay: [R, H].
            rate: [R, H], or None.
        """
        plan, outs = self._plan, []
        # Rows of their own, since a fused pass may read what is kept.
        given = [x.float().contiguous() for x in (key, value, decay, rate) if x is not None]
        states = self.states(key.new_zeros(0, dtype=torch.float32), (value.shape[1], key.shape[2], value.shape[2]))
        ends: list[Tensor | None] = []
        for group in self._groups:
            size, rows = plan.sizes[group[0]], slice(plan.firsts[group[0]], plan.firsts[group[-1] + 1])
            states_B = [states[index] for index in group]
            state_B = torch.stack(states_B) if len(group) > 1 else states_B[0][None]
            query_B, key_B, value_B, decay_B, *rate_B = (
                x[rows].unflatten(0, (-1, size)) for x in (query.float(), *given)
            )
            chain = self.chains[group[0]]
            seen = None if chain else plan.ancestors[rows, :size].unflatten(0, (-1, size)).to(key.device)
            out, end_B = recur(query_B, key_B, value_B, decay_B, rate_B[0] if rate_B else None, state_B, seen)
            assert out is not None, "there are queries"
            outs.append(out.flatten(0, 1))
            # With other texts a clone: a view would keep what the whole pass computed.
            alone = len(group) == 1
            ends += [None] * len(group) if end_B is None else [end if alone else end.clone() for end in end_B]
        self.keep_rows(states, given, ends)
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def states(self, like: Tensor, shape: tuple[int, int, int]) -> list[Tensor]:
        """The layer's state [H, K, V] before the rows of each text."""
        found = []
        for text, length in self._plan.texts:
            state = self._states.before(text, (self.layer, "state"), length, _apply_rows)
            found.append(like.new_zeros(shape) if state is None else state)
        return found

    def reach(self) -> list[tuple[Kept | None, list[int]]]:
        """What is kept of the layer's state for each text, and which of its rows were accepted since."""
        return [self._states.reach(text, (self.layer, "state"), length) for text, length in self._plan.texts]

    def keep_rows(self, states: Sequence[Tensor], given: Sequence[Tensor], ends: Sequence[Tensor | None]) -> None:
        """Keep the layer's states, the inputs [R, ...] of the rows, and the states after chains."""
        for index, (state, end) in enumerate(zip(states, ends, strict=True)):
            own = slice(self._plan.firsts[index], self._plan.firsts[index + 1])
            self._keep(index, (self.layer, "state"), state, tuple(x[own] for x in given), end)

    def _keep(self, index: int, part: object, state: Tensor, rows: tuple[Tensor, ...], end: Tensor | None) -> None:
        text, length = self._plan.texts[index]
        size = self._plan.sizes[index]
        if len(self._plan.sizes) > 1:
            rows = tuple(x.clone() for x in rows)
        self._states.keep(text, part, Kept(length, state, rows, size, end))

    def _taken(self, width: int) -> Tensor:
        """[R, width + 1] int64 indices of each row's inputs: windows of all texts come first, then all rows."""
        plan, windows = self._plan, len(self._plan.sizes) * width
        index_R = torch.arange(plan.rows, device=plan.parents.device)
        ends_R = plan.sequences * width + width - 1  # the last input before each text's rows
        above_R = torch.where(plan.nodes == 0, ends_R, windows + index_R - plan.nodes + plan.parents)
        before = torch.arange(windows, device=index_R.device)
        above = torch.cat([(before - 1).clamp(min=0), above_R])
        taken = [windows + index_R]
        for _ in range(width):
            taken.append(above[taken[-1]])
        return torch.stack(taken[::-1], dim=1)


def _move_window(window: Tensor, rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([window, rows[0]])[-len(window) :].clone()


def _apply_rows(state: Tensor, rows: Sequence[Tensor]) -> Tensor:
    key, value, decay, *rate = (x[None] for x in rows)
    end = recur(None, key, value, decay, rate[0] if rate else None, state[None])[1]
    assert end is not None, "the rows are a chain"
    return end[0]
