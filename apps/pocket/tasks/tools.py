"""Tool calls: a question, the call it needs, the tool's result, and the sentence that reports it.

The markup of the calls is written by the prompt encoder. Some questions need no tool, so that the
model does not call one just because it could.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from edgedsv4.text.messages import Message, Schema, ToolCall
from pocket.documents import Check, Document
from pocket.tasks.draw import Draw
from pocket.tasks.identity import WHO_ANSWER, WHO_QUESTIONS
from pocket.tasks.lexicon import CODE_WORDS, HOBBIES, NAMES, listed

CITIES = listed(
    """Paris London Rome Berlin Madrid Vienna Oslo Cairo Lima Tokyo Delhi Athens Dublin Prague
    Lisbon Warsaw Moscow Toronto Sydney Nairobi Boston Chicago Denver Dallas Havana Bogota Seoul
    Bangkok Hanoi Manila"""
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_EVENTS = ("a meeting", "lunch", "dinner", "a doctor visit", "a phone call", "a walk",
           "a piano lesson", "football", "a party", "shopping")  # fmt: skip
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")

Arguments = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a tool: what is asked, the arguments, the result and the closing sentence."""

    question: str
    arguments: Arguments
    result: Arguments
    closing: str


def _schema(name: str, description: str, **parameters: str) -> Schema:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in parameters.items()},
            "required": list(parameters),
        },
    }


def _weather(draw: Draw) -> _Use:
    city, sky, degrees = draw.pick(CITIES), draw.pick(_SKIES), draw.integer(0, 35)
    ask = draw.pick(("What is the weather in {c}?", "How is the weather in {c} today?",
                     "Is it warm in {c}?"))  # fmt: skip
    return _Use(
        ask.format(c=city),
        {"city": city},
        {"sky": sky, "degrees": degrees},
        f"It is {sky} in {city}, {degrees} degrees.",
    )


def _time(draw: Draw) -> _Use:
    city, hour, minute = draw.pick(CITIES), draw.integer(0, 23), draw.integer(0, 59)
    ask = draw.pick(("What time is it in {c}?", "Tell me the time in {c}."))
    clock = f"{hour}:{minute:02}"
    return _Use(ask.format(c=city), {"city": city}, {"time": clock}, f"It is {clock} in {city}.")


def _event(draw: Draw) -> _Use:
    title, day, hour = draw.pick(_EVENTS), draw.pick(_DAYS), draw.integer(7, 21)
    ask = draw.pick(("Put {t} on {d} at {h} in my agenda.", "Add {t} on {d} at {h}.",
                     "I have {t} on {d} at {h}, please note it."))  # fmt: skip
    return _Use(
        ask.format(t=title, d=day, h=hour),
        {"title": title, "day": day, "hour": hour},
        {"ok": True},
        f"I added {title} on {day} at {hour}.",
    )


def _agenda(draw: Draw) -> _Use:
    day = draw.pick(_DAYS)
    titles = draw.sample(_EVENTS, draw.integer(0, 2))
    ask = draw.pick(("What is in my agenda on {d}?", "Do I have plans on {d}?"))
    said = f"you have {' and '.join(titles)}" if titles else "you have nothing"
    return _Use(ask.format(d=day), {"day": day}, {"events": titles}, f"On {day} {said}.")


def _timer(draw: Draw) -> _Use:
    minutes = draw.integer(2, 90)
    ask = draw.pick(("Set a timer for {m} minutes.", "Wake me in {m} minutes."))
    return _Use(
        ask.format(m=minutes),
        {"minutes": minutes},
        {"ok": True},
        f"The timer is set for {minutes} minutes.",
    )


def _message(draw: Draw) -> _Use:
    name, hobby = draw.pick(NAMES), draw.pick(HOBBIES)
    ask = draw.pick(("Write to {n}: let us {h}.", "Send {n} this message: let us {h}."))
    return _Use(
        ask.format(n=name, h=hobby),
        {"to": name, "text": f"let us {hobby}"},
        {"ok": True},
        f"I sent the message to {name}.",
    )


def _note(draw: Draw) -> _Use:
    words = " ".join(draw.sample(CODE_WORDS, draw.integer(1, 4)))
    ask = draw.pick(("Write down: {w}", "Make a note: {w}"))
    return _Use(ask.format(w=words), {"text": words}, {"ok": True}, "I wrote it down.")


def _price(draw: Draw) -> _Use:
    item, price = draw.pick(CODE_WORDS), draw.integer(1, 99)
    ask = draw.pick(("What does a {i} cost?", "Find the price of a {i}."))
    return _Use(
        ask.format(i=item), {"item": item}, {"price": price}, f"A {item} costs {price} dollars."
    )


_TOOLS: Mapping[str, tuple[Schema, Callable[[Draw], _Use]]] = {
    str(schema["name"]): (schema, use)
    for schema, use in (
        (_schema("get_weather", "Weather of a city", city="string"), _weather),
        (_schema("get_time", "Time in a city", city="string"), _time),
        (
            _schema("add_event", "Add to the agenda", title="string", day="string", hour="integer"),
            _event,
        ),
        (_schema("get_agenda", "Events of a day", day="string"), _agenda),
        (_schema("set_timer", "Start a timer", minutes="integer"), _timer),
        (_schema("send_message", "Send a message", to="string", text="string"), _message),
        (_schema("add_note", "Keep a note", text="string"), _note),
        (_schema("get_price", "Price of an item", item="string"), _price),
    )
}


def tool_document(rng: Random) -> Document:
    """A conversation with one to four tools at hand."""
    draw = Draw(rng)
    names = draw.sample(tuple(_TOOLS), draw.integer(1, 4))
    system = draw.pick(("", "You are a helpful assistant."))
    thinks = draw.chance(0.25)
    messages = [Message("system", system)] if system else []
    if draw.chance(0.12):
        messages.append(Message("user", draw.pick(WHO_QUESTIONS)))
        checks = {len(messages): Check(WHO_ANSWER)}
        reasoning = "I need no tool." if thinks else ""
        messages.append(Message("assistant", WHO_ANSWER, reasoning=reasoning))
    else:
        name = draw.pick(names)
        use = _TOOLS[name][1](draw)
        messages.append(Message("user", use.question))
        checks = {
            len(messages): Check(json.dumps([[name, use.arguments]]), "tool_call"),
            len(messages) + 2: Check(use.closing),
        }
        call = ToolCall("call_0", name, json.dumps(use.arguments))
        reasoning = f"I need {name}." if thinks else ""
        messages += [
            Message("assistant", reasoning=reasoning, tool_calls=(call,)),
            Message("tool", json.dumps(use.result), tool_call_id="call_0"),
            Message("assistant", use.closing, reasoning="I have the result." if thinks else ""),
        ]
    return Document(
        task="tools",
        messages=tuple(messages),
        thinking="high" if thinks else "none",
        tools=tuple(_TOOLS[name][0] for name in names),
        checks=checks,
        nats=draw.nats,
        floor_is_exact=False,
    )
