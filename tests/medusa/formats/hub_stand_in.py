"""A Hub in a thread: the part of its HTTP API that huggingface_hub uses to make, fill and read model repositories.

Repositories are kept in memory. Files of the kinds that the Hub keeps apart go through the LFS protocol: batch, PUT,
verify, and a redirect on reading. Uploads by Xet are a protocol of their own, which clients turn off.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from tests.local_server import Handler, Server

TOKEN = "hf_of_the_stand_in"
USER = "tester"
LARGE = (".safetensors", ".pt")


class RefusalError(Exception):
    """Status, the Hub's code for it, and its words."""


@dataclass
class Repository:
    """Branches, and of every commit the files by name; a file of the LFS store is its hash in a tuple."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes | tuple[str]]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes | tuple[str]], message: str) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.messages.append(message)
        return sha

    def resolve(self, revision: str) -> str:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise RefusalError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha


class HubStandIn:
    """What the server holds, and what it was asked.

    Attributes:
        repositories: By name.
        large: Content of the LFS store, by hash.
        uploaded: Hashes in the order of their uploads.
        requests: Method and path of every request.
        broken: Status that every request gets instead of an answer; 0 = none.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.uploaded: list[str] = []
        self.requests: list[str] = []
        self.broken = 0

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Contents of a repository."""
        repository = self.repositories[name]
        files = repository.commits[repository.resolve(revision)]
        return {path: self.content(entry) for path, entry in files.items()}

    def content(self, entry: bytes | tuple[str]) -> bytes:
        return self.large[entry[0]] if isinstance(entry, tuple) else entry

    def repository(self, name: str, user: str | None) -> Repository:
        found = self.repositories.get(name)
        if found is None or (found.private and user is None):
            raise RefusalError(404 if user else 401, "RepoNotFound", "Repository not found")
        return found

    def create(self, user: str | None, body: dict[str, Any]) -> tuple[int, Any]:
        if user is None:
            raise RefusalError(401, "", "Invalid username or password.")
        if (owner := body.get("organization") or user) != user:
            raise RefusalError(403, "", f"You don't have the rights to create a model under the namespace {owner}")
        name = f"{owner}/{body['name']}"
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        self.repositories[name] = repository = Repository(
            body.get("visibility") == "private" or bool(body.get("private"))
        )
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return 200, {"url": f"{self.url}/{name}", "name": name}

    def info(self, name: str, repository: Repository, revision: str) -> dict[str, Any]:
        sha = repository.resolve(revision)
        files = repository.commits[sha]
        return {
            "id": name, "sha": sha, "private": repository.private, "tags": [],
            "siblings": [{"rfilename": path} for path in files],
            "cardData": self.metadata(self.content(files.get("README.md", b"")).decode()),
        }  # fmt: skip

    def tree(self, repository: Repository, revision: str) -> list[dict[str, Any]]:
        entries = []
        for path, entry in repository.commits[repository.resolve(revision)].items():
            content = self.content(entry)
            entries.append({"type": "file", "path": path, "size": len(content), "oid": git_hash(content)})
            if isinstance(entry, tuple):
                entries[-1]["lfs"] = {"oid": entry[0], "size": len(content), "pointerSize": 134}
        return entries

    def preupload(self, repository: Repository, revision: str, body: dict[str, Any]) -> dict[str, Any]:
        there = repository.commits[repository.resolve(revision)]
        answers = []
        for file in body["files"]:
            mode = "lfs" if file["path"].endswith(LARGE) else "regular"
            answer = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
            if (entry := there.get(file["path"])) is not None:
                answer["oid"] = entry[0] if isinstance(entry, tuple) else git_hash(entry)
            answers.append(answer)
        return {"files": answers}

    def batch(self, body: dict[str, Any]) -> dict[str, Any]:
        def upload(item: dict[str, Any]) -> dict[str, Any]:
            if item["oid"] in self.large:
                return item
            links = {kind: {"href": f"{self.url}/lfs/{kind}/{item['oid']}"} for kind in ("upload", "verify")}
            return item | {"actions": links}

        return {"transfer": "basic", "objects": [upload(item) for item in body["objects"]]}

    def commit(self, name: str, repository: Repository, branch: str, lines: bytes) -> dict[str, Any]:
        header, *operations = [json.loads(line) for line in lines.splitlines()]
        files = dict(repository.commits[repository.resolve(branch)])
        for operation in operations:
            value = operation["value"]
            match operation["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.large:
                        raise RefusalError(400, "", f"LFS pointer {value['path']} points to nothing that was uploaded")
                    files[value["path"]] = (value["oid"],)
                case "deletedFile":
                    del files[value["path"]]
        sha = repository.commit(branch, files, header["value"]["summary"])
        return {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha, "pullRequestUrl": None}

    @staticmethod
    def metadata(card: str) -> dict[str, Any]:
        """The metadata block of a model card."""
        _, _, rest = card.partition("---\n")
        return yaml.safe_load(rest.partition("\n---")[0]) or {}


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(Handler):
    def handle_any(self) -> None:
        hub: HubStandIn = self.server.hub  # type: ignore[attr-defined]
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        with self.server.lock:  # type: ignore[attr-defined]
            hub.requests.append(f"{self.command} {path}")
            try:
                if hub.broken:
                    raise RefusalError(hub.broken, "", "no service")
                self.route(hub, self.user(), [unquote(part) for part in path.strip("/").split("/")], body)
            except RefusalError as refusal:
                status, code, words = refusal.args
                codes = {"X-Error-Code": code} if code else {}
                self.answer(status, {"error": words}, **codes, **{"X-Error-Message": words})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def user(self) -> str | None:
        given = self.headers.get("authorization")
        if given not in (None, f"Bearer {TOKEN}"):
            raise RefusalError(401, "", "Invalid credentials in Authorization header")
        return USER if given else None

    def route(self, hub: HubStandIn, user: str | None, parts: list[str], body: bytes) -> None:
        match self.command, *parts:
            case "POST", "api", "validate-yaml":
                self.validate(hub, json.loads(body)["content"])
            case "POST", "api", "repos", "create":
                self.answer(*hub.create(user, json.loads(body)))
            case _, "api", "models", owner, name, *rest:
                self.model(hub, user, f"{owner}/{name}", rest, body)
            case "POST", _, _, "info", "lfs", "objects", "batch":
                self.answer(200, hub.batch(json.loads(body)))
            case "PUT", "lfs", "upload", oid:
                assert hashlib.sha256(body).hexdigest() == oid
                hub.large[oid] = body
                hub.uploaded.append(oid)
                self.answer(200, {})
            case "POST", "lfs", "verify", oid:
                self.answer(200 if oid in hub.large else 404, {})
            case "GET" | "HEAD", "large", oid:
                assert user is None, "a token went to the store"
                self.answer(200, hub.large[oid])
            case "GET" | "HEAD", owner, name, "resolve", revision, *path:
                self.file(hub, hub.repository(f"{owner}/{name}", user), revision, "/".join(path))
            case _:
                raise RefusalError(404, "", "no such address")

    def model(self, hub: HubStandIn, user: str | None, name: str, rest: list[str], body: bytes) -> None:
        repository = hub.repository(name, user)
        if self.command == "POST" and user is None:
            raise RefusalError(401, "", "Invalid username or password.")
        match rest:
            case []:
                self.answer(200, hub.info(name, repository, "main"))
            case "revision", revision:
                self.answer(200, hub.info(name, repository, revision))
            case "tree", revision:
                self.answer(200, hub.tree(repository, revision))
            case "branch", branch:
                status = 409 if branch in repository.branches else 200
                repository.branches.setdefault(branch, repository.branches["main"])
                self.answer(status, {})
            case "preupload", revision:
                self.answer(200, hub.preupload(repository, revision, json.loads(body)))
            case "commit", branch:
                self.answer(200, hub.commit(name, repository, branch, body))

    def validate(self, hub: HubStandIn, card: str) -> None:
        try:
            metadata = hub.metadata(card)
        except yaml.YAMLError as error:
            return self.answer(400, {"errors": [{"message": str(error)}]})
        return self.answer(200, {"warnings": [] if metadata else [{"message": "empty or missing yaml metadata"}]})

    def file(self, hub: HubStandIn, repository: Repository, revision: str, path: str) -> None:
        sha = repository.resolve(revision)
        if (entry := repository.commits[sha].get(path)) is None:
            raise RefusalError(404, "EntryNotFound", "Entry not found")
        if isinstance(entry, tuple):
            (oid,) = entry
            linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(hub.large[oid]))}
            elsewhere = hub.url.replace("127.0.0.1", "localhost")  # a host that tokens are not for
            self.answer(302, b"", **linked, **{"X-Repo-Commit": sha, "Location": f"{elsewhere}/large/{oid}"})
        else:
            self.answer(200, entry, **{"X-Repo-Commit": sha, "ETag": f'"{git_hash(entry)}"'})

    def answer(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = {} if isinstance(content, bytes) else {"Content-Type": "application/json"}
        self.reply(status, kind | headers, data)


@contextmanager
def hub_stand_in() -> Iterator[HubStandIn]:
    """A running Hub without repositories."""
    server = Server(_Handler)
    hub = server.hub = HubStandIn(server.url)  # type: ignore[attr-defined]
    with server.running():
        yield hub
