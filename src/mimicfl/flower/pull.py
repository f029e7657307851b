"""Pulls replies from a SuperLink one by one: a reply that is unreadable or incomplete concerns its sender only.

Flower's grid pulls all replies together. It raises if one of them cannot be read, which the SuperLink does not check: the run ends, and
the other replies are lost. If a client was killed while it sent its reply, the grid waits for the rest of it, for minutes and whatever
the deadline of the round.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import Message, Metadata
from flwr.app.error import Error
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError, inflate_object_from_contents
from flwr.superlink.grid import HttpGrid

UNREADABLE = 100  # an error code that Flower does not use


@dataclass
class Incoming:
    """A reply that the SuperLink has announced, of which parts may still be on their way."""

    metadata: Any  # from the SuperLink: what the reply says about itself may be forged
    missing: list[str]  # ids of the objects that it consists of
    contents: dict[str, bytes] = field(default_factory=dict)


class Inbox:
    """The replies of one grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.incoming: dict[str, Incoming] = {}  # id of the message that it answers -> reply

    def pull(self, message_ids: list[str]) -> Iterator[Message]:
        """The replies to these messages that have arrived completely. Raises if the SuperLink cannot be reached."""
        if not isinstance(self.grid, HttpGrid):
            yield from self.grid.pull_messages(message_ids)
            return
        self._announce(self.grid, [message_id for message_id in message_ids if message_id not in self.incoming])
        for answered, reply in list(self.incoming.items()):
            if (message := _message(self.grid, reply)) is not None:
                del self.incoming[answered]
                yield message

    def _announce(self, grid: HttpGrid, message_ids: list[str]) -> None:
        """Ask for new replies; in halves, if the answer is too large."""
        if not message_ids:
            return
        try:
            found = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.REQUEST_ENTITY_TOO_LARGE or len(message_ids) < 2:
                raise
            for half in (message_ids[::2], message_ids[1::2]):
                self._announce(grid, half)
            return
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            objects = [each.object_id for each in iterate_object_tree(tree)]
            self.incoming[message.metadata.reply_to_message_id] = Incoming(message.metadata, objects)


def _message(grid: HttpGrid, reply: Incoming) -> Message | None:
    """The reply, or an error reply that says why it cannot be read; None while parts of it are missing."""
    client, run_id = grid._runtime_client, grid.run.run_id
    fetch = make_pull_object_fn_protobuf(pull_object_protobuf=client.PullObject, node=grid.node, run_id=run_id)
    announced = reply.metadata
    try:
        while reply.missing:
            reply.contents[reply.missing[-1]] = fetch(reply.missing[-1])
            reply.missing.pop()
        received = ConfirmMessageReceivedRequest(node=grid.node, run_id=run_id, message_object_id=announced.message_id)
        client.ConfirmMessageReceived(received)
        message = inflate_object_from_contents(announced.message_id, reply.contents)
        if not isinstance(message, Message) or message.metadata.reply_to_message_id != announced.reply_to_message_id:
            raise TypeError("not the announced reply")
        message.metadata.__dict__["_message_id"] = announced.message_id
        return message
    except ObjectUnavailableError:
        return None
    except ObjectPullError as error:  # the client did not complete it in time
        return _error(grid, announced, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, str(error))
    except httpx.HTTPError:
        raise
    except Exception as error:
        return _error(grid, announced, UNREADABLE, type(error).__name__)


def _error(grid: HttpGrid, announced: Any, code: int, why: str) -> Message:
    node, run_id, created = grid.node.node_id, grid.run.run_id, now().timestamp()
    about = Metadata(run_id, "", node, node, announced.reply_to_message_id, "", created, 0, SYSTEM_MESSAGE_TYPE)
    return make_message(metadata=about, error=Error(code=code, reason=why))
