"""The loop over tokens of rows in slots: a row that ends makes its slot free for a row that waits.

All ranks know which row is in which slot, and how many tokens it has. A rank chooses the tokens of its own slots. The
ranks tell each other which rows met a stop token every few tokens, as in the loop without slots.

Shapes: n rows of the request, r slots of this rank, t new tokens, v vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.engine import unshard_dtensor

from ._choice import choose_rows
from ._request import GenerationRequest, Prompt
from ._slots import Slots


class SlotLoop:
    """The state of the loop."""

    def __init__(self, slots: Slots, request: GenerationRequest, ask_every: int) -> None:
        self.slots, self.rows, self.request, self.ask_every = slots, slots.rows, request, ask_every
        self.numbered = request.rows
        """The prompt and the sample of each row; the property of the request makes the tuple for each read."""
        count, device = len(self.numbered), slots.device
        lengths = [len(request.prompts[prompt]) for prompt, _ in self.numbered]
        self.waiting = deque(sorted(range(count), key=lengths.__getitem__, reverse=True))
        """Rows without a slot. Rows of similar lengths enter together: their prompts are padded to the longest."""
        self.row_of: list[int | None] = [None] * self.rows.count
        self.lengths = [0] * self.rows.count
        """Number of tokens that were chosen in each slot."""
        self.turns, self.asked = 0, 0
        self.tokens_nt = torch.zeros(count, request.max_new_tokens, dtype=torch.int64, device=device)
        self.log_probs_nt = torch.zeros(count, request.max_new_tokens, device=device)
        self.last_r = torch.zeros(self.rows.held, dtype=torch.int64, device=device)
        self.ended_r = torch.zeros(self.rows.held, dtype=torch.bool, device=device)
        self.stop = torch.tensor(request.stop, dtype=torch.int64, device=device)

    def run(self) -> tuple[Tensor, Tensor] | None:
        """Return tokens and log-probabilities [n, t] of all rows; None if decode steps do not fit the model."""
        while True:
            self._release()
            if entered := self._entered():
                if not self._begin(entered):
                    return None
                continue
            if all(row is None for row in self.row_of):
                return self._result()
            logits_rv = self.slots.step(self.last_r, self._places())
            if logits_rv is None:
                return None
            self._choose([slot for slot, row in enumerate(self.row_of) if row is not None], logits_rv)
            self.turns += 1

    def _release(self) -> None:
        """Make the slots of complete rows free: those with all tokens, and those that are known to have ended."""
        is_due = bool(self.request.stop) and self.turns % self.ask_every == 0 and self.turns > self.asked
        ended = [False] * self.rows.count
        if is_due:
            self.asked, ended = self.turns, unshard_dtensor(self.rows.joined(self.ended_r)).tolist()
        for slot, has_ended in enumerate(ended):
            is_complete = has_ended or self.lengths[slot] == self.request.max_new_tokens
            if is_complete and self.row_of[slot] is not None:
                self.row_of[slot] = None
                self.slots.release(slot)

    def _entered(self) -> list[int]:
        """Move rows that wait into free slots whose ranks have memory for them, and return these slots."""
        entered: list[int] = []
        for slot, row in enumerate(self.row_of):
            if row is None and self.waiting and self.slots.reserve(slot, self._prompt_of(self.waiting[0])):
                self.row_of[slot], self.lengths[slot] = self.waiting.popleft(), 0
                entered.append(slot)
        return entered

    def _begin(self, slots: Sequence[int]) -> bool:
        """Choose the first tokens of rows that entered these slots; False if steps do not fit the model."""
        self.ended_r[self._held(slots)] = False
        logits_av = self.slots.admit({slot: self._prompt(slot) for slot in slots})
        if logits_av is None:
            return False
        self._choose(slots, logits_av, are_all=False)
        return True

    def _choose(self, slots: Sequence[int], logits_rv: Tensor, are_all: bool = True) -> None:
        """Choose a token in each of these slots; the logits are those of all slots of this rank, or of these only."""
        own = [slot for slot in slots if self.rows.has(slot)]
        rows = [self._row(slot) for slot in own]
        steps = [self.lengths[slot] for slot in own]
        mine = None if are_all and len(own) == self.rows.held else self._held(own)
        logits_rv = logits_rv[mine] if are_all and mine is not None else logits_rv
        chosen_r, log_probs_r = choose_rows(logits_rv, self.request, [self.numbered[row] for row in rows], steps)
        self._keep(chosen_r, log_probs_r, rows, steps, slice(None) if mine is None else mine)
        for slot in slots:
            self.lengths[slot] += 1

    def _keep(
        self, chosen_r: Tensor, log_probs_r: Tensor, rows: Sequence[int], steps: Sequence[int], mine: Tensor | slice
    ) -> None:
        """Write tokens and log-probabilities of rows at steps; `mine` are the numbers of their slots on this rank."""
        if self.request.stop:
            ended_r = self.ended_r[mine]
            chosen_r, log_probs_r = chosen_r.masked_fill(ended_r, 0), log_probs_r.masked_fill(ended_r, 0.0)
            self.ended_r[mine] = ended_r | torch.isin(chosen_r, self.stop)
        places = torch.tensor([rows, steps], dtype=torch.int64, device=self.slots.device)
        self.tokens_nt[places[0], places[1]] = chosen_r
        self.log_probs_nt[places[0], places[1]] = log_probs_r
        self.last_r[mine] = chosen_r

    def _result(self) -> tuple[Tensor, Tensor]:
        """Return the tokens of all ranks: each row is zero on ranks that do not have it."""
        packed_n2t = torch.stack([self.tokens_nt.double(), self.log_probs_nt.double()], 1)
        tokens_nt, log_probs_nt = unshard_dtensor(self.rows.of_ranks.joined(packed_n2t[None])).sum(0).unbind(1)
        return tokens_nt.long(), log_probs_nt.float()

    def _places(self) -> list[int]:
        """Return the position of the last token in each slot; 0 in a free one."""
        return [
            0 if row is None else len(self._prompt(slot)) + self.lengths[slot] - 1
            for slot, row in enumerate(self.row_of)
        ]

    def _prompt(self, slot: int) -> Prompt:
        return self._prompt_of(self._row(slot))

    def _prompt_of(self, row: int) -> Prompt:
        return self.request.prompts[self.numbered[row][0]]

    def _row(self, slot: int) -> int:
        row = self.row_of[slot]
        assert row is not None
        return row

    def _held(self, slots: Sequence[int]) -> Tensor:
        """Return the numbers of those slots that are this rank's, among its own."""
        own = [slot - self.rows.first for slot in slots if self.rows.has(slot)]
        return torch.tensor(own, dtype=torch.int64, device=self.slots.device)
