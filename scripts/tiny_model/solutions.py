"""Step-by-step solutions of reasoning-gym problems, as text to train a policy on.

Each solver is a pure function of a dataset entry and a random generator. The generator only chooses among equally
valid ways to write the same solution, such as the opening or a check at the end. This makes two correct rollouts of a
trained policy differ. Solutions calculate digit by digit, so that each step is new text that is computed from nearby
digits, and not a copy of earlier text.

Every solution ends with ``<answer>…</answer>``, which `reasoning_gym.utils.extract_answer` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

Entry = Mapping[str, Any]
"""A reasoning-gym problem: ``question``, ``answer`` and ``metadata`` with the generator's parameters."""

_TERM = re.compile(r"([+-])\s*(\d+)")


class UnsupportedProblemError(ValueError):
    """A problem without a solution that can be written. The message states the reason."""


def solve(entry: Entry, rng: Random) -> str:
    """Write out the solution of a problem.

    Args:
        entry: an item of one of the datasets in `solvable_datasets`.
        rng: chooses between equally valid wordings. The same state gives the same text.

    Returns:
        The text of the assistant's turn, ending with ``<answer>…</answer>``.

    Raises:
        UnsupportedProblemError: for another dataset, or for a problem outside what its solver handles.
    """
    dataset = entry["metadata"]["source_dataset"]
    solver = _SOLVERS.get(dataset)
    if solver is None:
        raise UnsupportedProblemError(
            f"no solution is known for dataset {dataset!r}; choose from {', '.join(solvable_datasets())}"
        )
    steps, answer = solver(entry, rng)
    closing = rng.choice(("", "", "", "Done.\n", "So the answer is:\n"))
    return f"{steps}\n{closing}<answer>{answer}</answer>"


def solvable_datasets() -> tuple[str, ...]:
    """Return the names of the reasoning-gym datasets that `solve` handles."""
    return tuple(_SOLVERS)


def column_sum(a: int, b: int) -> str:
    """Add two non-negative integers column by column, units first: ``8+7=15 6+6+1=13 -> 135``."""
    columns = []
    carry = 0
    for x, y in _columns(a, b):
        total = x + y + carry
        columns.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return f"{' '.join(columns)} -> {a + b}"


def column_difference(a: int, b: int) -> str:
    """Subtract ``b <= a`` from ``a`` column by column with borrows: ``15-7=8 13-6-1=6 2-0-1=1 -> 168``."""
    columns = []
    borrowed = 0
    for x, y in _columns(a, b):
        minuend = x if x - y - borrowed >= 0 else x + 10
        columns.append(f"{minuend}-{y}{'-1' if borrowed else ''}={minuend - y - borrowed}")
        borrowed = int(minuend != x)
    return f"{' '.join(columns)} -> {a - b}"


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Return the digits of both numbers by column, units first, with the shorter number padded with zeros."""
    width = max(len(str(a)), len(str(b)))
    return [(int(x), int(y)) for x, y in zip(f"{a:0{width}}"[::-1], f"{b:0{width}}"[::-1], strict=True)]


def _chain_sum(entry: Entry, rng: Random) -> tuple[str, int]:
    """Add and subtract from left to right, with running totals."""
    expression = entry["metadata"]["expression"]
    terms = [(sign, int(digits)) for sign, digits in _TERM.findall(f"+{expression}")]
    if expression != " ".join(f"{sign} {value}" for sign, value in terms)[2:]:
        raise UnsupportedProblemError(
            f"chain_sum: cannot read {expression!r}; only non-negative terms are handled (allow_negation: false)"
        )
    total = terms[0][1]
    lines = [rng.choice(("Start with {}", "Take {}", "Begin at {}")).format(total)]
    for sign, value in terms[1:]:
        lines.append(f"{sign} {value}: {_signed_step(total, sign, value)}")
        total += value if sign == "+" else -value
    return "\n".join(lines), total


def _signed_step(total: int, sign: str, value: int) -> str:
    """Return the text of one step of a running total, which may be negative: the columns and the new total."""
    new = total + value if sign == "+" else total - value
    if (total >= 0) == (sign == "+"):
        text = column_sum(abs(total), value)
    elif abs(total) >= value:
        text = column_difference(abs(total), value)
    else:
        text = f"flip {column_difference(value, abs(total))}"
    return text if new >= 0 else f"below zero {text.replace('-> ', '-> -')}"


def _products(entry: Entry, rng: Random) -> tuple[str, int]:
    """Multiply digit by digit, sometimes with a check that multiplies in the other order."""
    factors = [factor.strip() for factor in entry["metadata"]["expression"].split("*")]
    if not all(factor.isdecimal() for factor in factors):
        raise UnsupportedProblemError(
            f"products: cannot read {entry['metadata']['expression']!r}; "
            "only non-negative factors are handled (allow_negation: false)"
        )
    numbers = [int(factor) for factor in factors]
    opening = rng.choice(("Multiply digit by digit.", "Long multiplication.", "Digit by digit:"))
    lines = [opening]
    product = numbers[0]
    for factor in numbers[1:]:
        swap = len(numbers) == 2 and rng.random() < 0.3
        lines += _long_multiplication(*((factor, product) if swap else (product, factor)))
        product *= factor
    if len(numbers) == 2 and rng.random() < 0.2:
        first, second = (numbers[0], numbers[1]) if swap else (numbers[1], numbers[0])
        lines += ["Check the other way.", *_long_multiplication(first, second)]
    return "\n".join(lines), product


def _long_multiplication(a: int, b: int) -> list[str]:
    """Return the lines of ``a * b``: a row for each digit of ``b``, units first, each added to the total so far."""
    lines = [f"{a} * {b}"]
    total = 0
    for place, digit in enumerate(int(x) for x in reversed(str(b))):
        row = []
        carry = 0
        for x in (int(x) for x in reversed(str(a))):
            value = x * digit + carry
            row.append(f"{x}*{digit}{f'+{carry}' if carry else ''}={value}")
            carry = value // 10
        partial = a * digit * 10**place
        lines.append(f"{digit}: {' '.join(row)} -> {partial}")
        if place:
            lines.append(f"add: {column_sum(total, partial)}")
        total += partial
    return lines


def _count_bits(entry: Entry, rng: Random) -> tuple[str, int]:
    """Halve the number until it is zero, and count the odd numbers."""
    number = int(entry["metadata"]["number"])
    ones = 0
    lines = [rng.choice(("Halve and count the odd ones.", "Count odd numbers while halving."))]
    while number:
        ones += number % 2
        lines.append(f"{number} {'odd' if number % 2 else 'even'} {ones}")
        number //= 2
    return "\n".join(lines), ones


def _gcd(entry: Entry, rng: Random) -> tuple[str, int]:
    """Apply Euclid's algorithm to the numbers in turn."""
    numbers = [int(number) for number in entry["metadata"]["numbers"]]
    result = numbers[0]
    lines = [rng.choice(("Euclid's algorithm.", "Divide with remainder.", "Use remainders."))]
    for number in numbers[1:]:
        a, b = max(result, number), min(result, number)
        while b:
            lines.append(f"{a} = {a // b} * {b} + {a % b}")
            a, b = b, a % b
        result = a
        lines.append(f"gcd {result}")
    return "\n".join(lines), result


_SOLVERS: dict[str, Callable[[Entry, Random], tuple[str, int]]] = {
    "chain_sum": _chain_sum,
    "products": _products,
    "count_bits": _count_bits,
    "gcd": _gcd,
}
