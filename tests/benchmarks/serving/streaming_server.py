"""An OpenAI-compatible server that streams: its model counts, "1 2 3 ..." up to max_tokens."""

import json
import sys
import time

from tests.local_server import Handler, Server


def events(request, per_chunk=1, ending="length"):
    """The stream's bytes: as many tokens as are asked for, so many in each chunk."""
    wanted, options = request["max_tokens"], request["stream_options"]
    chat = "messages" in request
    bodies = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}] if chat else []
    for first in range(0, wanted, per_chunk):
        done = min(first + per_chunk, wanted)
        text = "".join(f" {number + 1}" for number in range(first, done))
        body = {"choices": [{"delta": {"content": text}} if chat else {"text": text}]}
        bodies.append(body | ({"usage": usage(done)} if options.get("continuous_usage_stats") else {}))
    bodies.append({"choices": [{"delta": {}, "finish_reason": ending}]})
    bodies.append({"choices": [], "usage": usage(wanted)})
    return [f"data: {json.dumps(body)}\n\n".encode() for body in bodies] + [b": comment\n\ndata: [DONE]\n\n"]


def usage(tokens):
    return {"completion_tokens": tokens, "prompt_tokens": 3, "total_tokens": tokens + 3}


class StreamingServer(Server):
    """What arrived, and how to reply.

    Attributes:
        reply: Request -> pieces of the body, sent one by one, or status and text.
        paths: Where requests went.
        pause: Seconds before each piece.
    """

    def __init__(self, port=0):
        super().__init__(_Handler, port)
        self.reply = events
        self.paths = []
        self.pause = 0.0


class _Handler(Handler):
    def do_GET(self):  # noqa: N802
        body = {"data": [{"id": "counting"}]} if self.path == "/v1/models" else {}
        self.reply(200, {}, json.dumps(body).encode())

    def do_POST(self):  # noqa: N802
        request = self.asked()
        self.server.paths.append(self.path)
        with self.server.counted(request):
            pieces = self.server.reply(request)
            if isinstance(pieces, tuple):
                self.reply(pieces[0], {}, pieces[1].encode())
            else:
                self._stream(pieces)

    def _stream(self, pieces):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            time.sleep(self.server.pause)
            if piece is None:  # hang up
                self.close_connection = True
                return
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")


if __name__ == "__main__":
    if sys.argv[2:] == ["broken"]:
        sys.exit("no model here")
    StreamingServer(int(sys.argv[1])).serve_forever()
