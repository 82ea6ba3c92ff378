"""Sums, differences and products of numbers of up to three digits, with or without thinking.

The thinking works digit by digit, from the right, so that every step is a single small fact. A
twentieth of the larger problems never occurs in training.
"""

from __future__ import annotations

import zlib
from random import Random

from pocket.documents import Check, Document, chat
from pocket.tasks.draw import Draw

_HELD_OUT_OF = 20
_ASK = ("What is {e}?", "Calculate {e}.", "How much is {e}?", "{e} = ?", "Compute {e}.",
        "Please work out {e}.")  # fmt: skip
_WORDS = {
    "+": ("What is {a} plus {b}?", "Add {a} and {b}."),
    "-": ("What is {a} minus {b}?", "Subtract {b} from {a}."),
    "*": ("What is {a} times {b}?", "Multiply {a} by {b}."),
}


def is_held_out(a: int, operator: str, b: int) -> bool:
    """Whether training leaves this problem out; problems with a one-digit number never are."""
    if min(a, b) < 10:
        return False
    return zlib.crc32(f"{a}{operator}{b}".encode()) % _HELD_OUT_OF == 0


def add_steps(a: int, b: int) -> str:
    """Addition by columns, from the right."""
    steps, carry, digits = [], 0, []
    for i in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**i % 10, b // 10**i % 10
        total = x + y + carry
        extra = f" + {carry}" if carry else ""
        steps.append(f"{x} + {y}{extra} = {total}, write {total % 10}")
        digits.append(total % 10)
        carry = total // 10
    if carry:
        steps.append(f"write {carry}")
    return "; ".join(steps) + f". So {a} + {b} = {a + b}."


def subtract_steps(a: int, b: int) -> str:
    """Subtraction by columns, from the right; the smaller number is taken from the larger."""
    if a < b:
        return f"{a} is less than {b}. {subtract_steps(b, a)} So {a} - {b} = {a - b}."
    steps, borrow = [], 0
    for i in range(len(str(a))):
        x, y = a // 10**i % 10, b // 10**i % 10
        taken = f" - {borrow}" if borrow else ""
        need = x - y - borrow
        if need < 0:
            steps.append(f"1{x} - {y}{taken} = {need + 10}, write {need + 10}, borrow 1")
        else:
            steps.append(f"{x} - {y}{taken} = {need}, write {need}")
        borrow = int(need < 0)
    return "; ".join(steps) + f". So {a} - {b} = {a - b}."


def multiply_steps(a: int, b: int) -> str:
    """Multiplication: a row of products for each digit of `b`, then their sum."""
    if b > a and len(str(b)) > len(str(a)):
        return f"{a} * {b} = {b} * {a}. {multiply_steps(b, a)} So {a} * {b} = {a * b}."
    rows, parts = [], []
    for i, digit in enumerate(int(char) for char in reversed(str(b))):
        steps, carry = [], 0
        for j in range(len(str(a))):
            x = a // 10**j % 10
            total = x * digit + carry
            extra = f" + {carry}" if carry else ""
            steps.append(f"{x} * {digit}{extra} = {total}, write {total % 10}")
            carry = total // 10
        if carry:
            steps.append(f"write {carry}")
        parts.append(a * digit * 10**i)
        rows.append(f"{'; '.join(steps)}. {a} * {digit * 10**i} = {parts[-1]}.")
    total = parts[0]
    for part in parts[1:]:
        rows.append(add_steps(total, part))
        total += part
    return " ".join(rows) + f" So {a} * {b} = {total}."


def steps(a: int, operator: str, b: int) -> str:
    """The thinking for one problem; it ends with the result."""
    return {"+": add_steps, "-": subtract_steps, "*": multiply_steps}[operator](a, b)


def draw_problem(draw: Draw, *, held_out: bool, digits: int | None = None) -> tuple[int, str, int]:
    """Two numbers and an operator; `digits` fixes the size of both numbers."""
    while True:
        sizes = [digits or draw.weighted((1, 2, 3), (2, 3, 3)) for _ in range(2)]
        a, b = (draw.integer(10 ** (n - 1) if n > 1 else 0, 10**n - 1) for n in sizes)
        operator = draw.weighted("+-*", (3, 3, 3))
        if is_held_out(a, operator, b) == held_out or max(sizes) == 1:
            return a, operator, b


def arithmetic_document(
    rng: Random, *, held_out: bool = False, thinks: bool | None = None, digits: int | None = None
) -> Document:
    """One to three problems; with thinking it is the last that is thought about.

    Args:
        rng: seeded source.
        held_out: draw problems that training leaves out.
        thinks: fixes the mode; None draws it.
        digits: fixes the size of the numbers.
    """
    draw = Draw(rng)
    if thinks is None:
        thinks = draw.chance(0.7)
    turns, reasoning, checks = [], "", {}
    for i in range(draw.integer(1, 2 if thinks else 3)):
        a, operator, b = draw_problem(draw, held_out=held_out, digits=digits)
        result = {"+": a + b, "-": a - b, "*": a * b}[operator]
        shown = draw.pick("*x") if operator == "*" else operator
        asks = (*_ASK, *_WORDS[operator])
        question = draw.pick(asks).format(a=a, b=b, e=f"{a} {shown} {b}")
        reasoning = steps(a, operator, b) if thinks else ""
        turns.append((question, f"{a} {operator} {b} = {result}"))
        checks[2 * i + 1] = Check(str(result), "number")
    return Document(
        task="arith",
        messages=chat(turns, reasoning=reasoning),
        thinking="high" if thinks else "none",
        checks=checks,
        nats=draw.nats,
        floor_is_exact=False,
    )
