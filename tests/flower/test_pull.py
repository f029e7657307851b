"""Replies from a SuperLink: objects that a hostile SuperNode may send, since the SuperLink does not look into them."""

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid

from mimicfl.flower.messages import reason
from mimicfl.flower.pull import Inbox

DIVIDER = b"\x00"  # between the head and the body of an object
REQUESTS = ["request-0", "request-1", "request-2"]


def request(number):
    message = Message(RecordDict({"config": ConfigRecord({"number": number})}), number, "train")
    message.metadata.__dict__["_message_id"] = f"request-{number}"
    return message


def reply(number):
    records = {
        "arrays": ArrayRecord({"w": Array(np.full(3, number, dtype=np.float32))}),
        "metrics": MetricRecord({"num-examples": 1 + number}),
    }
    message = Message(RecordDict(records), reply_to=request(number))
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


class SuperLink:
    """Hands out replies as a SuperLink does: announced once, then object by object. `spoil` changes the objects of client 1."""

    def __init__(self, replies, spoil=None, most=100):
        self.replies, self.objects, self.most = dict(replies), {}, most
        self.delivered, self.pulled, self.confirmed = set(), [], []
        for number, message in self.replies.items():
            contents = {key: each.deflate() for key, each in get_all_nested_objects(message).items()}
            self.objects |= spoil(contents, message) if spoil and number == 1 else contents

    def PullMessages(self, asked):
        if len(asked.message_ids) > self.most:
            answer = httpx.Response(413, request=httpx.Request("POST", "http://superlink"))
            raise httpx.HTTPStatusError("too large", request=answer.request, response=answer)
        found = [m for m in self.replies.values() if m.metadata.reply_to_message_id in set(asked.message_ids) - self.delivered]
        self.delivered |= {m.metadata.reply_to_message_id for m in found}
        protos = [message_to_proto(remove_content_from_message(m)) for m in found]
        return PullAppMessagesResponse(messages_list=protos, message_object_trees=[get_object_tree(m) for m in found])

    def PullObject(self, asked):
        self.pulled.append(asked.object_id)
        content = self.objects.get(asked.object_id)
        found, here = asked.object_id in self.objects, content is not None
        return PullObjectResponse(object_found=found, object_available=here, object_content=content or b"")

    def ConfirmMessageReceived(self, asked):
        self.confirmed.append(asked.message_object_id)


def grid_of(link):
    grid = HttpGrid(token="token")
    grid.set_run(Run.create_empty(run_id=1))
    grid._client = link
    return grid


def body(garbage, kind):
    """Replace the body of the objects of one kind by garbage of the same length."""

    def spoil(contents, message):
        changed = {}
        for key, content in contents.items():
            head, _, rest = content.partition(DIVIDER)
            is_kind = head.startswith(kind.encode() + b" ")
            changed[key] = head + DIVIDER + (garbage * len(rest))[: len(rest)] if is_kind else content
        assert changed != contents
        return changed

    return spoil


def other_root(contents, message):
    """The announced message is a record."""
    record = next(content for content in contents.values() if content.startswith(b"MetricRecord "))
    return contents | {message.metadata.message_id: record}


def forged(contents, message):
    """The message says that it answers the request of client 2."""
    mine = request(2).metadata.message_id.encode()
    return contents | {message.metadata.message_id: contents[message.metadata.message_id].replace(b"request-1", mine)}


def lost(contents, message):
    """The client did not complete its reply in time."""
    return {key: content for key, content in contents.items() if not content.startswith(b"MetricRecord ")}


SPOILS = {
    **{
        f"{kind} of {name}": body(garbage, kind)
        for kind in ("Message", "RecordDict", "ArrayRecord", "MetricRecord", "Array")
        for name, garbage in {"zeros": b"\0", "ones": b"\xff", "text": b"nonsense "}.items()
    },
    "another object": other_root,
    "forged": forged,
    "lost": lost,
}


@pytest.mark.parametrize("kind", SPOILS)
def test_an_unreadable_reply_costs_its_sender_the_round_only(kind):
    link = SuperLink({number: reply(number) for number in range(3)}, SPOILS[kind])
    found = {m.metadata.reply_to_message_id: m for m in Inbox(grid_of(link)).pull(REQUESTS)}
    assert list(found) == REQUESTS
    for number in (0, 2):
        np.testing.assert_array_equal(found[f"request-{number}"].content["arrays"]["w"].numpy(), np.full(3, number))
    bad = found["request-1"]
    if bad.has_error():
        assert ("its reply expired" if kind == "lost" else "its reply cannot be read") in reason(bad)
    else:  # some garbage can be read; what it holds is checked later, as in test_hostile.py
        assert bad.content.keys() != reply(1).content.keys() or kind.startswith("Array")


def test_an_incomplete_reply_holds_up_nobody_and_is_continued():
    """A client that is killed while it sends its reply must not block the server."""
    link = SuperLink({number: reply(number) for number in range(3)})
    withheld = {key: content for key, content in link.objects.items() if content.startswith(b"ArrayRecord ")}
    mine = next(key for key in withheld if key in get_all_nested_objects(link.replies[1]))
    content, link.objects[mine] = link.objects[mine], None
    inbox = Inbox(grid_of(link))
    assert [m.metadata.reply_to_message_id for m in inbox.pull(REQUESTS)] == ["request-0", "request-2"]
    assert list(inbox.pull(REQUESTS)) == []
    link.objects[mine] = content
    [late] = inbox.pull(REQUESTS)
    np.testing.assert_array_equal(late.content["arrays"]["w"].numpy(), np.ones(3))
    assert {key for key in link.pulled if link.pulled.count(key) > 1} == {mine}  # nothing else was pulled twice
    assert len(link.confirmed) == 3


def test_answers_that_are_too_large_are_asked_for_in_parts():
    link = SuperLink({number: reply(number) for number in range(3)}, most=1)
    assert sorted(m.metadata.reply_to_message_id for m in Inbox(grid_of(link)).pull(REQUESTS)) == REQUESTS


def test_a_superlink_that_cannot_be_reached_raises():
    link = SuperLink({0: reply(0)}, most=0)
    with pytest.raises(httpx.HTTPStatusError):
        list(Inbox(grid_of(link)).pull(["request-0"]))
