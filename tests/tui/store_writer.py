"""A program that writes conversations until it is killed, and says what it has written.

Arguments: folder. Each line on stdout is `conversation node` of a question that was saved, printed
after the save; between two lines a reply grows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dsv4_chat.conversation import Conversation
from dsv4_chat.store import Store


def main() -> None:
    store = Store(Path(sys.argv[1]))
    while True:
        conversation = Conversation()
        for turn in range(20):
            question = conversation.append("user", f"question {turn} " + "long " * 50 * turn)
            store.save_node(conversation, question)
            print(conversation.id, question.id, flush=True)
            reply = conversation.append("assistant", "", state="streaming")
            for _ in range(5):
                reply.content += "some more of the answer "
                store.save_node(conversation, reply)
            reply.state = "complete"
            store.save_node(conversation, reply)
        path = store.snapshot_path(conversation.id)
        path.write_bytes(b"x" * 1000)
        store.snapshot_saved(conversation.id)


if __name__ == "__main__":
    main()
