"""Continuous batching: a sequence joins the batch when there is a row for it and leaves it when it has ended.

Each turn takes the next token of every running sequence and some that are guessed behind it, in one call of fixed
shapes; the state after each token goes to a slot of its own, so that a wrong guess costs nothing to take back.
"""

import threading
from collections import deque
from dataclasses import dataclass, field

import torch
from model import Model, Places
from slots import Pool, PrefixCache


@dataclass(eq=False)
class Request:
    """A prompt, and what comes of it. ends: the token after which it ends, or None."""

    prompt: list[int]
    most: int
    ends: int | None = None
    output: list[int] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class _Running:
    """slot: of the state behind all tokens but the last. spare: slots for the states of the next turn."""

    request: Request
    slot: int
    spare: list[int]


def guess(tokens: list[int], count: int) -> list[int]:
    """What followed the last two tokens when they came before; else the last token again."""
    last = tokens[-2:]
    for start in range(len(tokens) - 3, -1, -1):
        if tokens[start : start + 2] == last:
            found = tokens[start + 2 : start + 2 + count]
            return found + found[-1:] * (count - len(found))
    return tokens[-1:] * count


class Engine:
    """rows: sequences at once. guesses: tokens guessed a turn, 0 to 7. block: tokens between states of the cache."""

    def __init__(self, model: Model, rows: int = 8, guesses: int = 3, block: int = 16, slots: int = 128) -> None:
        if slots < (2 + guesses) * rows:
            raise ValueError(f"slots: expected {(2 + guesses) * rows} or more for {rows} rows; got {slots}")
        self.model, self.tokens = model, 1 + guesses
        self.pool = Pool(model, slots)
        self.cache = PrefixCache(self.pool, block)
        self.rows: list[_Running | None] = [None] * rows
        self.waiting: deque[Request] = deque()
        self.turns = 0

    def add(self, request: Request) -> Request:
        if not request.prompt:
            raise ValueError("prompt: expected one token or more; got none")
        self.waiting.append(request)
        return request

    def is_idle(self) -> bool:
        return not self.waiting and not any(self.rows)

    def turn(self) -> None:
        """Takes in what there are rows for, then goes on by a token or more in every sequence."""
        for row, running in enumerate(self.rows):
            if running is None and self.waiting and self.cache.make_room(1 + self.tokens):
                self.rows[row] = self._admitted(self.waiting.popleft())
        if any(self.rows):
            self._decode()

    def _admitted(self, request: Request) -> _Running | None:
        """Reads the prompt from the longest prefix on whose state is held, and leaves states at the ends of blocks."""
        slot, *spare = self.pool.take(1 + self.tokens)
        start, known = self.cache.longest(request.prompt)
        places = Places(known, slot, self.cache.block, self.cache.keep(request.prompt, start))
        logits = self.model.prefill(request.prompt[start:], self.pool.layers, places)
        return self._kept(_Running(request, slot, spare), [int(logits.argmax())])

    def _kept(self, running: _Running, tokens: list[int]) -> _Running | None:
        """None for a sequence that has ended with these tokens, whose slots are free then."""
        request = running.request
        for token in tokens:
            request.output.append(token)
            if token == request.ends or len(request.output) >= request.most:
                self.pool.give_back([running.slot, *running.spare])
                request.done.set()
                return None
        return running

    def _decode(self) -> None:
        self.turns += 1
        device = self.model.embed.weight.device
        tokens = torch.zeros(len(self.rows), self.tokens, dtype=torch.long)
        slots = torch.full((len(self.rows),), -1, dtype=torch.int32)
        following = torch.full((len(self.rows), self.tokens), -1, dtype=torch.int32)
        for row, running in enumerate(self.rows):
            if running is not None:
                seen = running.request.prompt + running.request.output
                tokens[row] = torch.tensor([seen[-1], *guess(seen, self.tokens - 1)])
                slots[row], following[row] = running.slot, torch.tensor(running.spare, dtype=torch.int32)
        logits = self.model.decode(tokens.to(device), self.pool.layers, slots.to(device), following.to(device))
        right = logits.argmax(-1).cpu()
        for row, running in enumerate(self.rows):
            if running is not None:
                # as many guesses as are what the model says
                same = (tokens[row, 1:] == right[row, :-1]).int().cumprod(0)
                taken = int(same.sum())
                used = running.spare.pop(taken)
                running.spare.append(running.slot)
                running.slot = used
                self.rows[row] = self._kept(running, right[row, : taken + 1].tolist())
