"""A Hub in a thread: the part of its HTTP API that huggingface_hub uses to make, fill and read model repositories.

Repositories are kept in memory. Files of the kinds that the Hub keeps apart go through the LFS protocol: batch, PUT,
verify, and a redirect on reading. Uploads by Xet are a protocol of their own, which clients turn off.
"""

import base64
import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    commits: dict[str, dict] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch, files, message):
        sha = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.messages.append(message)
        return sha

    def at(self, revision):
        """The hash of a commit, and its files."""
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise RefusalError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, self.commits[sha]


@dataclass
class HubStandIn:
    """What the server holds."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    """By name."""
    large: dict[str, bytes] = field(default_factory=dict)
    """Content of the LFS store, by hash."""
    uploaded: list[str] = field(default_factory=list)
    """Hashes in the order of their uploads."""
    broken: int = 0
    """Status that every request gets instead of an answer; 0 = none."""

    def files(self, name, revision="main"):
        """Contents of a repository."""
        return {path: self.content(entry) for path, entry in self.repositories[name].at(revision)[1].items()}

    def content(self, entry):
        return self.large[entry[0]] if isinstance(entry, tuple) else entry

    def repository(self, name, user):
        found = self.repositories.get(name)
        if found is None or (found.private and user is None):
            raise RefusalError(404 if user else 401, "RepoNotFound", "Repository not found")
        return found

    def create(self, user, body):
        if user is None:
            raise RefusalError(401, "", "Invalid username or password.")
        if (owner := body.get("organization") or user) != user:
            raise RefusalError(403, "", f"You don't have the rights to create a model under the namespace {owner}")
        name = f"{owner}/{body['name']}"
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        self.repositories[name] = Repository(body.get("visibility") == "private" or bool(body.get("private")))
        self.repositories[name].commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return 200, {"url": f"{self.url}/{name}", "name": name}

    def info(self, name, repository, revision):
        sha, files = repository.at(revision)
        card = metadata(self.content(files.get("README.md", b"")).decode())
        siblings = [{"rfilename": path} for path in files]
        return {
            "id": name, "sha": sha, "private": repository.private, "tags": [], "siblings": siblings, "cardData": card,
        }  # fmt: skip

    def tree(self, repository, revision):
        entries = []
        for path, entry in repository.at(revision)[1].items():
            content = self.content(entry)
            entries.append({"type": "file", "path": path, "size": len(content), "oid": git_hash(content)})
            if isinstance(entry, tuple):
                entries[-1]["lfs"] = {"oid": entry[0], "size": len(content), "pointerSize": 134}
        return entries

    def preupload(self, repository, revision, body):
        _, there = repository.at(revision)
        answers = []
        for path in (file["path"] for file in body["files"]):
            mode = "lfs" if path.endswith(LARGE) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False})
            if (entry := there.get(path)) is not None:
                answers[-1]["oid"] = entry[0] if isinstance(entry, tuple) else git_hash(entry)
        return {"files": answers}

    def batch(self, objects):
        for item in objects:
            if item["oid"] not in self.large:
                kinds = ("upload", "verify")
                item["actions"] = {kind: {"href": f"{self.url}/lfs/{kind}/{item['oid']}"} for kind in kinds}
        return {"transfer": "basic", "objects": objects}

    def commit(self, name, repository, branch, lines):
        header, *operations = [json.loads(line) for line in lines.splitlines()]
        files = dict(repository.at(branch)[1])
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


def metadata(card):
    """The metadata block of a model card."""
    return yaml.safe_load(card.partition("---\n")[2].partition("\n---")[0]) or {}


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(Handler):
    def handle_any(self):
        hub, parts = self.server.hub, [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        with self.server.lock:
            try:
                if hub.broken:
                    raise RefusalError(hub.broken, "", "no service")
                self.route(hub, self.user(), parts, body)
            except RefusalError as refusal:
                status, code, words = refusal.args
                codes = {"X-Error-Code": code} if code else {}
                self.answer(status, {"error": words}, **codes, **{"X-Error-Message": words})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def user(self):
        given = self.headers.get("authorization")
        if given not in (None, f"Bearer {TOKEN}"):
            raise RefusalError(401, "", "Invalid credentials in Authorization header")
        return USER if given else None

    def route(self, hub, user, parts, body):
        match self.command, *parts:
            case "POST", "api", "validate-yaml":
                self.validate(json.loads(body)["content"])
            case "POST", "api", "repos", "create":
                self.answer(*hub.create(user, json.loads(body)))
            case _, "api", "models", owner, name, *rest:
                self.model(hub, user, f"{owner}/{name}", rest, body)
            case "POST", _, _, "info", "lfs", "objects", "batch":
                self.answer(200, hub.batch(json.loads(body)["objects"]))
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
                self.file(hub, *hub.repository(f"{owner}/{name}", user).at(revision), "/".join(path))
            case _:
                raise RefusalError(404, "", "no such address")

    def model(self, hub, user, name, rest, body):
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

    def validate(self, card):
        try:
            warnings = [] if metadata(card) else [{"message": "empty or missing yaml metadata"}]
            self.answer(200, {"warnings": warnings})
        except yaml.YAMLError as error:
            self.answer(400, {"errors": [{"message": str(error)}]})

    def file(self, hub, sha, files, path):
        entry = files.get(path)
        if entry is None:
            raise RefusalError(404, "EntryNotFound", "Entry not found")
        if isinstance(entry, tuple):
            (oid,) = entry
            linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(hub.large[oid]))}
            elsewhere = hub.url.replace("127.0.0.1", "localhost")  # a host that tokens are not for
            self.answer(302, b"", **linked, **{"X-Repo-Commit": sha, "Location": f"{elsewhere}/large/{oid}"})
        else:
            self.answer(200, entry, **{"X-Repo-Commit": sha, "ETag": f'"{git_hash(entry)}"'})

    def answer(self, status, content, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = {} if isinstance(content, bytes) else {"Content-Type": "application/json"}
        self.reply(status, kind | headers, data)


@contextmanager
def hub_stand_in():
    """A running Hub without repositories."""
    server = Server(_Handler)
    server.hub = HubStandIn(server.url)
    with server.running():
        yield server.hub
