"""
A stand-in for the Hub's HTTP API on loopback, as far as the real `huggingface_hub` client uses it for models.

Repositories, branches, pre-upload, LFS (batch, put, verify), commits, trees, and files behind redirects, as the Hub
does it: relative for small files, to another path (its "CDN") for large ones. Everything lives in memory. Xet is not
served: clients switch it off with HF_HUB_DISABLE_XET=1.
"""

import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_stand_in_token"
_LARGE = (".safetensors", ".npz", ".png")
_LIST_FIELDS = ("tags", "datasets")


class FakeHub:
    """Use as a context manager; `endpoint` goes into HF_ENDPOINT."""

    def __init__(self):
        self.repos = {}  # id → {"private", "branches": {name: commit}, "commits": {commit: {path: bytes}}}
        self.blobs = {}  # sha256 → bytes
        self.requests = []
        self.times = []
        self.fail = {}  # part of a path → status code
        self.lost = {}  # repository → status code of the answer to a commit, which is made all the same
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def env(self, tmp_path, token=TOKEN):
        """Settings of a client process."""
        settings = {
            "HF_ENDPOINT": self.endpoint, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
        }  # fmt: skip
        return settings | ({"HF_TOKEN": token} if token else {})

    def files(self, repo, revision="main"):
        """Content of a repository by path."""
        found = self.repos[repo]
        return found["commits"][found["branches"].get(revision, revision)]

    def create(self, repo, private):
        first = hashlib.sha1(repo.encode()).hexdigest()
        start = {".gitattributes": b"*.safetensors filter=lfs\n"}
        self.repos[repo] = {"private": private, "branches": {"main": first}, "commits": {first: start}}

    def commit(self, repo, branch, lines):
        found = self.repos[repo]
        files = dict(found["commits"][found["branches"][branch]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"])
        state = json.dumps([found["branches"][branch], lines[0], sorted(files)]).encode()
        oid = hashlib.sha1(state).hexdigest()
        found["commits"][oid] = files
        found["branches"][branch] = oid
        return oid

    def _handler(self):
        hub = self

        class Handler(_Handler):
            def handle_one(self):
                hub.requests.append(f"{self.command} {self.path}")
                hub.times.append(time.time())
                for part, status in hub.fail.items():
                    if part in self.path:
                        return self.reply(status, {"error": "the stand-in was told to fail"})
                return self.route(hub)

        return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.handle_one()

    do_HEAD = do_POST = do_PUT = do_GET

    def reply(self, status, content=None, headers=None):
        body = content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status, code, text):
        self.reply(status, {"error": text}, {"X-Error-Code": code, "X-Error-Message": text})

    def may_write(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def route(self, hub):
        path = unquote(urlsplit(self.path).path)
        routes = [
            ("POST", r"/api/repos/create", self.create),
            ("POST", r"/api/validate-yaml", self.validate),
            ("POST", r"/api/models/(\w[\w.-]*/[\w.-]+)/preupload/(.+)", self.preupload),
            ("POST", r"/api/models/(\w[\w.-]*/[\w.-]+)/commit/(.+)", self.commit),
            ("POST", r"/api/models/(\w[\w.-]*/[\w.-]+)/branch/(.+)", self.branch),
            ("POST", r"/(\w[\w.-]*/[\w.-]+)\.git/info/lfs/objects/batch", self.lfs_batch),
            ("PUT", r"/lfs/(\w+)", self.lfs_put),
            ("POST", r"/lfs-verify", self.lfs_verify),
            ("GET", r"/api/models/(\w[\w.-]*/[\w.-]+)/tree/([^/]+)", self.tree),
            ("GET", r"/api/models/(\w[\w.-]*/[\w.-]+)/revision/([^/]+)", self.info),
            ("GET", r"/api/models/(\w[\w.-]*/[\w.-]+)", self.info),
            ("*", r"/(\w[\w.-]*/[\w.-]+)/resolve/([^/]+)/(.+)", self.resolve),
            ("*", r"/api/resolve-cache/(\w[\w.-]*/[\w.-]+)/(\w+)/(.+)", self.cached),
            ("*", r"/cdn/(\w+)", self.cdn),
        ]
        for method, pattern, handler in routes:
            match = re.fullmatch(pattern, path)
            if match and method in ("*", self.command):
                return handler(hub, *match.groups())
        return self.reply(404, {"error": f"the stand-in does not serve {self.command} {path}"})

    # --- writing ------------------------------------------------------------------------------------------------

    def create(self, hub):
        if not self.may_write():
            return self.reply(401, {"error": "Invalid credentials in Authorization header"})
        wanted = json.loads(self.body)
        repo = f"{wanted.get('organization') or 'tester'}/{wanted['name']}"
        if repo in hub.repos:
            return self.reply(409, {"error": "You already created this model repo", "url": f"{hub.endpoint}/{repo}"})
        hub.create(repo, wanted.get("visibility") == "private" or wanted.get("private", False))
        return self.reply(200, {"url": f"{hub.endpoint}/{repo}", "name": repo})

    def validate(self, hub):
        content = json.loads(self.body)["content"]
        match = re.match(r"---\s*\n(.*?)\n---\s*\n", content, flags=re.S)
        problems = []
        try:
            data = yaml.safe_load(match[1]) if match else None
        except yaml.YAMLError as error:
            data, problems = None, [str(error)]
        if not isinstance(data, dict):
            problems.append("the card has no metadata")
        else:
            problems += _metadata_problems(data)
        if problems:
            return self.reply(400, {"errors": [{"message": text} for text in problems], "warnings": []})
        return self.reply(200, {"errors": [], "warnings": []})

    def _repo(self, hub, repo, write=False):
        found = hub.repos.get(repo)
        if write and not self.may_write():
            self.reply(401, {"error": "Invalid credentials"})
            return None
        if found is None or (found["private"] and not self.may_write()):
            self.error(401 if not self.may_write() else 404, "RepoNotFound", "Repository not found")
            return None
        return found

    def preupload(self, hub, repo, revision):
        if self._repo(hub, repo, write=True) is None:
            return None
        files = json.loads(self.body)["files"]
        modes = [{"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(_LARGE) else "regular",
                  "shouldIgnore": False, "oid": None} for f in files]  # fmt: skip
        return self.reply(200, {"files": modes})

    def lfs_batch(self, hub, repo):
        if self._repo(hub, repo, write=True) is None:
            return None
        wanted = json.loads(self.body)
        assert wanted["operation"] == "upload" and wanted["hash_algo"] == "sha256"
        objects = [
            {
                **item,
                "actions": {
                    "upload": {"href": f"{hub.endpoint}/lfs/{item['oid']}"},
                    "verify": {"href": f"{hub.endpoint}/lfs-verify"},
                },
            }
            for item in wanted["objects"]
        ]
        return self.reply(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, hub, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.reply(400, {"error": "the content does not fit its oid"})
        hub.blobs[oid] = self.body
        return self.reply(200)

    def lfs_verify(self, hub):
        wanted = json.loads(self.body)
        return self.reply(200 if len(hub.blobs.get(wanted["oid"], b"")) == wanted["size"] else 404)

    def commit(self, hub, repo, revision):
        found = self._repo(hub, repo, write=True)
        if found is None:
            return None
        if revision not in found["branches"]:
            return self.error(404, "RevisionNotFound", "Invalid rev id")
        oid = hub.commit(repo, revision, [json.loads(line) for line in self.body.splitlines() if line.strip()])
        if repo in hub.lost:
            return self.reply(hub.lost[repo], {"error": "the stand-in was told to fail after the commit"})
        return self.reply(200, {"success": True, "commitOid": oid, "commitUrl": f"{hub.endpoint}/{repo}/commit/{oid}"})

    def branch(self, hub, repo, name):
        found = self._repo(hub, repo, write=True)
        if found is None:
            return None
        if name in found["branches"]:
            return self.reply(409, {"error": "Reference already exists"})
        found["branches"][name] = found["branches"]["main"]
        return self.reply(200)

    # --- reading ------------------------------------------------------------------------------------------------

    def _files(self, hub, repo, revision):
        found = self._repo(hub, repo)
        if found is None:
            return None, None
        commit = found["branches"].get(revision, revision)
        if commit not in found["commits"]:
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None, None
        return commit, found["commits"][commit]

    def info(self, hub, repo, revision="main"):
        commit, files = self._files(hub, repo, revision)
        if files is None:
            return None
        siblings = [{"rfilename": path} for path in sorted(files)]
        return self.reply(200, {"id": repo, "modelId": repo, "sha": commit, "private": hub.repos[repo]["private"],
                                "siblings": siblings, "tags": []})  # fmt: skip

    def tree(self, hub, repo, revision):
        _, files = self._files(hub, repo, revision)
        if files is None:
            return None
        entries = []
        for path, content in sorted(files.items()):
            entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            if path.endswith(_LARGE):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        return self.reply(200, entries)

    def resolve(self, hub, repo, revision, path):
        commit, files = self._files(hub, repo, revision)
        if files is None:
            return None
        if path not in files:
            return self.error(404, "EntryNotFound", "Entry not found")
        content, headers = files[path], {"X-Repo-Commit": commit}
        if path.endswith(_LARGE):
            oid = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
            # Another host name, as on the Hub: the client follows redirects within the Hub itself while it asks for facts.
            elsewhere = hub.endpoint.replace("127.0.0.1", "localhost")
            return self.reply(302, b"", {**headers, "Location": f"{elsewhere}/cdn/{oid}"})
        return self.reply(307, b"", {**headers, "Location": f"/api/resolve-cache/{repo}/{commit}/{path}"})

    def cached(self, hub, repo, commit, path):
        content = hub.repos[repo]["commits"][commit][path]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        return self.reply(200, content, headers)

    def cdn(self, hub, oid):
        content = hub.blobs[oid]
        return self.reply(200, content, {"ETag": f'"{oid}"', "Content-Type": "application/octet-stream"})


def _metadata_problems(data):
    """What the Hub is known to refuse in a model card's metadata."""
    problems = [f"{name} must be a list of texts" for name in _LIST_FIELDS
                if name in data and not (isinstance(data[name], list) and all(isinstance(x, str) for x in data[name]))]  # fmt: skip
    if "base_model" in data and not re.fullmatch(r"[\w.-]+/[\w.-]+", str(data["base_model"])):
        problems.append(f'"base_model" with value {data["base_model"]!r} is not valid. Use a model id from the Hub')
    for model in data.get("model-index", []):
        for result in model["results"]:
            if not result.get("task", {}).get("type") or not result.get("dataset", {}).get("type"):
                problems.append("every result of model-index needs task.type and dataset.type")
            problems += [f"a metric lacks {k}" for m in result["metrics"] for k in ("type", "value") if k not in m]
    return problems
