"""A draft head in the style of EAGLE-3 (arXiv 2503.01840) for the tiny model, and its training during a GRPO run.

The head reads the model's hidden states at a position and the token that was sampled there, and drafts the tokens that
follow, each from its own hidden state of the one before. In training it sees its own hidden states as well
("training-time test" in the paper), but the recorded tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from benchmarks.traces import Segment, Trajectory

STEPS = 4
"""Number of tokens that the head drafts."""
_READ_LAYERS = (1, 2, 4)
"""Layers of the tiny model, of four, whose outputs the head reads: a low, a middle and the last one."""
_STEP_DECAY = 0.8
"""Weight of the loss of each drafted token relative to the one before, as in EAGLE-3."""
_ROLLOUTS_PER_BATCH = 16
_IGNORED = -100
_PRETRAINING_SEED = 1


class Chains(NamedTuple):
    """What the head drafts after each token of a response; arrays of shape (tokens + 1, STEPS).

    Row i is the draft that follows the first i tokens of the response.
    """

    tokens: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    """The head's probability of each token, given those before."""


class Batch(NamedTuple):
    """The texts of several rollouts, with the model's hidden states."""

    tokens: torch.Tensor
    """Prompt and response, padded at the end with zeros, shape (rollouts, tokens)."""
    starts: list[int]
    """Length of each prompt."""
    ends: list[int]
    """Length of each prompt and response."""
    features: torch.Tensor
    """Outputs of some layers, concatenated, shape (rollouts, tokens, layers * hidden size)."""


class Policy:
    """A checkpoint of the tiny model, whose hidden states the head reads."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.inference_mode()
    def batches(self, rollouts: Sequence[Trajectory], *, pad_with: int) -> Iterator[tuple[list[int], Batch]]:
        """Yield batches of rollouts of similar lengths, each with the indices of its rollouts.

        Args:
            rollouts: rollouts of one turn.
            pad_with: number of zeros after each response, for the tokens that are drafted after its end.
        """
        texts = [np.concatenate([one.prompt, one.segments[0].tokens]).astype(np.int64) for one in rollouts]
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for first in range(0, len(order), _ROLLOUTS_PER_BATCH):
            chosen = order[first : first + _ROLLOUTS_PER_BATCH]
            ends = [len(texts[index]) for index in chosen]
            tokens = torch.zeros(len(chosen), max(ends) + pad_with, dtype=torch.int64)
            for row, index in enumerate(chosen):
                tokens[row, : ends[row]] = torch.from_numpy(texts[index])
            outputs = self.model.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
            features = torch.cat([outputs.hidden_states[layer] for layer in _READ_LAYERS], dim=-1)
            yield chosen, Batch(tokens, [len(rollouts[index].prompt) for index in chosen], ends, features)


class Head(nn.Module):
    """One transformer layer, with the embeddings and the output matrix of the first checkpoint as a start."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        config = policy.model.config
        self._heads, self._size = config.num_attention_heads, config.head_dim
        hidden = config.hidden_size
        self._reduce = nn.Linear(len(_READ_LAYERS) * hidden, hidden, bias=False)
        self._embed_norm, self._state_norm, self._mlp_norm, self._out_norm = (nn.RMSNorm(hidden) for _ in range(4))
        self._qkv = nn.Linear(2 * hidden, 3 * self._heads * self._size, bias=False)
        self._attention_out = nn.Linear(self._heads * self._size, hidden, bias=False)
        self._gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self._down = nn.Linear(config.intermediate_size, hidden, bias=False)
        self._embed = nn.Embedding(config.vocab_size, hidden)
        self._embed.weight.data.copy_(policy.model.get_input_embeddings().weight)
        self._embed.requires_grad_(False)
        self._out = nn.Linear(hidden, config.vocab_size, bias=False)
        self._out.weight.data.copy_(policy.model.lm_head.weight)

    def forward(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each drafted token, given the recorded tokens before it.

        Args:
            features: hidden states of the model, shape (rollouts, positions, layers * hidden size).
            tokens: tokens of the text, shape (rollouts, positions + STEPS).

        Returns:
            Logits of shape (STEPS, rollouts, positions, vocabulary). Those of step k at position i are for the token
            at position i + k + 2, where k starts at 0.
        """
        positions = features.shape[1]
        chain = _Chain(self, features)
        return torch.stack([chain.step(tokens[:, step + 1 : step + 1 + positions]) for step in range(STEPS)])

    @torch.inference_mode()
    def draft(self, features: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft after each position with the head's own likeliest tokens.

        Args:
            features: hidden states of the model, shape (rollouts, positions, layers * hidden size).
            tokens: the token that follows each position, shape (rollouts, positions).

        Returns:
            Drafted tokens and their probabilities, each of shape (rollouts, positions, STEPS).
        """
        chain, drafted = _Chain(self, features), []
        for _ in range(STEPS):
            best = chain.step(tokens).softmax(-1).max(-1)
            tokens = best.indices
            drafted.append(best)
        return torch.stack([one.indices for one in drafted], -1), torch.stack([one.values for one in drafted], -1)


class _Chain:
    """Drafts token by token after each position at once."""

    def __init__(self, head: Head, features: torch.Tensor) -> None:
        self._head, self._state = head, head._reduce(features)
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Keys and values of each step, shape (rollouts, heads, positions, head size)."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token at each position, shape (rollouts, positions), and return the logits of the next one."""
        head = self._head
        inputs = torch.cat([head._embed_norm(head._embed(tokens)), head._state_norm(self._state)], -1)
        query, key, value = (
            part.unflatten(-1, (head._heads, head._size)).transpose(1, 2) for part in head._qkv(inputs).chunk(3, -1)
        )
        offset = len(self._own)
        query, key = _rotate(query, offset), _rotate(key, offset)
        self._own.append((key, value))
        self._state = self._state + head._attention_out(self._attend(query).transpose(1, 2).flatten(-2))
        gate, up = head._gate_up(head._mlp_norm(self._state)).chunk(2, -1)
        self._state = self._state + head._down(functional.silu(gate) * up)
        logits: torch.Tensor = head._out(head._out_norm(self._state))
        return logits

    def _attend(self, query: torch.Tensor) -> torch.Tensor:
        """Attend to the text up to each position, in the first step's keys, and to the chain's own later tokens."""
        (key, value), *later = self._own
        positions = query.shape[2]
        scale = 1 / math.sqrt(query.shape[-1])
        causal = torch.ones(positions, positions, dtype=torch.bool).tril()
        text = (query @ key.transpose(-1, -2) * scale).masked_fill(~causal, -math.inf)
        own = [(query * other).sum(-1, keepdim=True) * scale for other, _ in later]
        weights = torch.cat([text, *own], -1).softmax(-1)
        result = weights[..., :positions] @ value
        for number, (_, other) in enumerate(later):
            result = result + weights[..., positions + number, None] * other
        return result


def _rotate(vectors: torch.Tensor, offset: int) -> torch.Tensor:
    """Apply rotary position embeddings; the first position is *offset*."""
    positions, size = vectors.shape[-2:]
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(offset, offset + positions), frequencies)
    cos, sin = angles.cos(), angles.sin()
    first, second = vectors.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Trainer:
    """Trains the head on the rollouts of each checkpoint."""

    def __init__(self, head: Head, *, learning_rate: float = 1e-3) -> None:
        self._head = head
        parameters = [one for one in head.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)

    def train(self, policy: Policy, rollouts: Sequence[Trajectory], passes: int) -> float:
        """Train on rollouts that a checkpoint has sampled, and return the mean loss of the last pass."""
        batches = [batch for _, batch in policy.batches(rollouts, pad_with=STEPS)]
        random = np.random.default_rng(0)
        losses: list[float] = []
        for _ in range(passes):
            losses = [self._update(batches[number]) for number in random.permutation(len(batches))]
        return float(np.mean(losses))

    def _update(self, batch: Batch) -> float:
        positions = batch.tokens.shape[1] - STEPS - 1
        with torch.autocast("cpu", torch.bfloat16):
            logits = self._head(batch.features[:, :positions].clone(), batch.tokens)
        loss = torch.zeros(())
        for step in range(STEPS):
            targets = batch.tokens[:, step + 2 : step + 2 + positions].clone()
            for row, (start, end) in enumerate(zip(batch.starts, batch.ends, strict=True)):
                # Only tokens of the response are drafted.
                targets[row, : max(0, start - step - 2)] = _IGNORED
                targets[row, max(0, end - step - 2) :] = _IGNORED
            loss = loss + _STEP_DECAY**step * functional.cross_entropy(
                logits[step].flatten(0, 1).float(), targets.flatten(), ignore_index=_IGNORED
            )
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self._optimizer.step()
        return loss.item()


def pretraining_texts(directory: Path, count: int) -> list[Trajectory]:
    """Return solved problems, as the tiny model was trained on, with its tokenizer.

    The problems differ from all others: their seed is not the model's.
    """
    from rollout_worker.engine.model_source import load_tokenizer
    from scripts.tiny_model.tasks import training_problems

    tokenizer = load_tokenizer(directory)
    texts: list[Trajectory] = []
    for _, question, solution in islice(training_problems(_PRETRAINING_SEED), count):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        tokens = [*tokenizer(solution, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        prompt_tokens = np.array(tokenizer(prompt, add_special_tokens=False)["input_ids"], np.uint32)
        segment = Segment(True, np.array(tokens, np.uint32))
        texts.append(Trajectory("pretraining", len(texts), "", prompt_tokens, (segment,)))
    return texts


def draft_all(head: Head, policy: Policy, rollouts: Sequence[Trajectory]) -> list[Chains]:
    """Return what the head drafts at every position of rollouts, given the hidden states of the current checkpoint."""
    chains: dict[int, Chains] = {}
    for chosen, batch in policy.batches(rollouts, pad_with=0):
        tokens, probabilities = head.draft(batch.features[:, :-1].clone(), batch.tokens[:, 1:].clone())
        for row, index in enumerate(chosen):
            # The draft after i tokens of the response reads the hidden state of the last token but one.
            known = slice(batch.starts[row] - 2, batch.ends[row] - 1)
            chains[index] = Chains(tokens[row, known].numpy(), probabilities[row, known].double().numpy())
    return [chains[index] for index in range(len(rollouts))]
