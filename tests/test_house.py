"""The house: eight files on top, rooms with a face, arrows that run down; and documents that say what is there."""

import ast
import functools
import glob
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

import settings

TOP = {"train_nova", "model", "muon", "data", "settings", "schedule", "plan", "sample"}
FLOORS = """settings schedule kernels hub < text model muon launch < track store data
< plan < sample share study bench < train_nova"""
FLOORS = {name: floor for floor, names in enumerate(FLOORS.split("<")) for name in names.split()}
ROOMS = [r for r in FLOORS if os.path.isdir(os.path.join(ROOT, r))]


def product() -> dict[str, str]:
    """{path: source} of the files on top and of the rooms."""
    paths = sorted(glob.glob("*.py", root_dir=ROOT) + glob.glob("*/*.py", root_dir=ROOT))
    return {path: page(path) for path in paths if not path.startswith(("tests/", "config/", "out/"))}


def page(path: str) -> str:
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


class House:
    """What imports what, read from {path: source}: `problems` holds a line for each import that breaks a rule.

    A node is a file: "model", "store.sealed", or "store" for the face store/__init__.py. Imports inside functions count.
    """

    def __init__(self, sources: dict[str, str]):
        self.nodes = {path[:-3].replace("/", ".").removesuffix(".__init__"): path for path in sources}
        self.trees = {node: ast.parse(sources[path]) for node, path in self.nodes.items()}
        self.rooms = {node.split(".")[0] for node in self.nodes if "." in node}
        self.faces = {room: self.names_of(room) for room in self.rooms}
        self.arrows = {node: set() for node in self.nodes}
        self.problems = []
        for node, tree in self.trees.items():
            for statement in ast.walk(tree):
                if isinstance(statement, ast.Import):
                    for alias in statement.names:
                        self.plain_import(node, statement, alias)
                elif isinstance(statement, ast.ImportFrom):
                    self.from_import(node, statement)
        self.find_circles()

    def names_of(self, room: str) -> list[str]:
        """`__all__` of a face."""
        for statement in self.trees.get(room, ast.Module([])).body:
            if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "__all__":
                return ast.literal_eval(statement.value)
        return []

    def complain(self, node, statement, what):
        line = f"{self.nodes[node]}:{statement.lineno}: {what}"
        self.problems += [line] if line not in self.problems else []

    def arrow(self, node, statement, target):
        """`node` needs `target`; from one floor to a lower one, except inside a room."""
        self.arrows[node].add(target)
        here, there = node.split(".")[0], target.split(".")[0]
        if here != there and FLOORS.get(here, -1) <= FLOORS.get(there, 99):
            self.complain(node, statement, f"the arrow {here} -> {there} does not run down")

    def plain_import(self, node, statement, alias):
        name, own = alias.name, node.split(".")[0]
        top = name.split(".")[0]
        if name in self.rooms and name != own:
            bound = alias.asname or name
            for use in (u for u in ast.walk(self.trees[node]) if isinstance(u, ast.Attribute)):
                if getattr(use.value, "id", "") == bound and use.attr not in self.faces[name]:
                    self.complain(node, use, f"{name}.{use.attr} goes past the face of {name}")
        elif top in self.rooms:
            self.complain(node, statement, f"`import {name}` goes past the face of {top}")
        if top in self.nodes:
            self.arrow(node, statement, name if name in self.nodes else top)

    def from_import(self, node, statement):
        own = node.split(".")[0]
        inside = own in self.rooms
        if statement.level > 1 or (statement.level and not inside):
            return self.complain(node, statement, "a relative import that leaves its room")
        source = ".".join(
            ([own] if statement.level else []) + ([statement.module] if statement.module else [])
        )
        top = source.split(".")[0]
        if top not in self.nodes and top not in self.rooms:
            return  # not ours
        if inside and top == own and not statement.level:
            self.complain(node, statement, "inside a room imports are relative")
        if top in self.rooms and top != own:
            if source != top:
                self.complain(node, statement, f"`from {source}` goes past the face of {top}")
            for name in {alias.name for alias in statement.names} - {*self.faces[top]}:
                self.complain(node, statement, f"{name} is no name of the face of {top}")
        modules = [f"{source}.{alias.name}" for alias in statement.names]
        targets = {m if m in self.nodes else source for m in modules}
        for target in targets | ({source} if source == top != own else set()):
            self.arrow(node, statement, target)

    def find_circles(self):
        """A line for each circle: from every node, depth first, back to a node on the way."""
        done, way = set(), []

        def walk(node):
            if node in way:
                self.problems.append("circle: " + " -> ".join([*way[way.index(node) :], node]))
            elif node not in done:
                way.append(node)
                for target in sorted(self.arrows.get(node, ())):
                    walk(target)
                done.add(way.pop())

        for node in self.arrows:
            walk(node)


@functools.cache
def nova() -> House:
    return House(product())


def test_eight_files_on_top():
    assert {name[:-3] for name in os.listdir(ROOT) if name.endswith(".py")} == TOP


def test_imports_pass_through_faces_and_run_down():
    """All of them, those inside functions too."""
    house = nova()
    assert sum(map(len, house.arrows.values())) > 60  # it does see them
    assert not house.problems, "\n".join(house.problems)


TOY = {
    "settings.py": "import json",
    "schedule.py": "",
    "model.py": "from kernels import sdpa\nfrom settings import Settings",
    "muon.py": "import kernels\nkernels.sdpa()",
    "plan.py": "def f():\n    from model import count\n    from launch import proof",
    "train_nova.py": "import model, muon\nimport plan\nfrom launch import proof\nproof.prove()",
    "kernels/__init__.py": "from .attention import sdpa\n__all__ = ['sdpa']",
    "kernels/attention.py": "from .cpu import blocks",
    "kernels/cpu.py": "import torch.nn",
    "launch/__init__.py": "__all__ = ['proof']",
    "launch/agreement.py": "from . import proof",
    "launch/proof.py": "from kernels import sdpa",
}
CPU, PROOF = "kernels/cpu.py", "launch/proof.py"
BAD = [  # past a face
    ("model.py", "from kernels.attention import sdpa", "past the face of kernels"),
    ("plan.py", "def f():\n    import launch.proof", "past the face of launch"),
    ("train_nova.py", "class A:\n    from launch.proof import *", "past the face of launch"),
    ("model.py", "from kernels import blocks", "blocks is no name of the face of kernels"),
    ("train_nova.py", "from launch import agreement as a", "agreement is no name of the face of launch"),
    ("plan.py", "import kernels as k\nk.cpu.blocks()", "kernels.cpu goes past the face"),
    (PROOF, "from ..kernels import sdpa", "leaves its room"),
    (PROOF, "from launch.agreement import agree", "inside a room imports are relative"),
    # an arrow that runs up
    ("schedule.py", "import plan", "schedule -> plan"),
    (CPU, "def f():\n    from settings import Settings", "kernels -> settings"),
    ("model.py", "import muon", "model -> muon"),
    (PROOF, "if True:\n    from plan import plan", "launch -> plan"),
    ("settings.py", "try:\n    import train_nova\nfinally:\n    pass", "settings -> train_nova"),
    ("ninth.py", "import model", "ninth -> model"),
    # a circle
    (CPU, "from .attention import sdpa", "kernels.attention -> kernels.cpu -> kernels.attention"),
    (PROOF, "def f():\n    from . import agreement", "circle: launch."),
    (CPU, "from . import sdpa", "circle: kernels -> kernels.attention -> kernels.cpu -> kernels"),
    (CPU, "import plan", "circle: "),
]


@pytest.mark.parametrize("path, line, words", BAD)
def test_a_bad_import_is_caught(path, line, words):
    assert House(TOY).problems == []
    problems = House({**TOY, path: f"{TOY.get(path, '')}\n{line}\n"}).problems
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize("room", ROOMS)
def test_a_face_says_what_its_room_is_for(room):
    """A docstring that names every file and the invariant, and names that are there."""
    house = nova()
    said = ast.get_docstring(house.trees[room])
    assert said and "invariant" in said and 5 <= len(said.splitlines()) <= 20
    files = {n.split(".")[1] for n in house.nodes if n.startswith(f"{room}.")} - {"__main__"}
    assert not {f for f in files if f"{f}.py" not in said}
    bound = {n.name for n in ast.walk(house.trees[room]) if isinstance(n, ast.alias)} | files
    bound |= {n.name for n in house.trees[room].body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assert set(house.faces[room]) <= bound


LOOK = """
import json, logging, os, signal, sys
def look():
    streams = [id(sys.stdout), id(sys.stderr), id(sys.excepthook), str(signal.getsignal(signal.SIGINT))]
    return [dict(os.environ), sorted(os.listdir()), list(map(str, logging.root.handlers)), logging.root.level, streams]
before, changed = look(), {}
for name in sys.argv[1:]:
    __import__(name)
    if (after := look()) != before:
        changed[name] = [[b, a] for b, a in zip(before, after) if a != b]
        before = after
print(json.dumps(["torch" in sys.modules, changed], default=str))
"""


def look_at(folder, *names):
    """Import these in a fresh process in an empty folder. -> (is torch there, {name: what it changed})"""
    how = dict(cwd=folder, env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True, timeout=120)
    done = subprocess.run([sys.executable, "-c", LOOK, *names], **how)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.count("\n") == 1, done.stdout  # and it says nothing
    return json.loads(done.stdout)


@pytest.mark.parametrize("room", ROOMS)
def test_importing_a_face_changes_nothing(room, tmp_path):
    """Environment, folder, logging, standard streams, signal handlers; and each face can be the first import."""
    assert look_at(tmp_path, room)[1] == {}


def test_importing_any_file_changes_nothing(tmp_path):
    """Every file of the product but those that only run (`__main__`), one after the other."""
    nodes = [n for n in nova().nodes if not n.endswith("__main__")]
    assert look_at(tmp_path, *sorted(nodes, key=lambda n: FLOORS.get(n.split(".")[0], 9)))[1] == {}


def test_first_lines_of_a_script_need_no_torch(tmp_path):
    assert look_at(tmp_path, "launch", "launch.entry", "settings") == [False, {}]


PAGES = ["README.md", *sorted(glob.glob("docs/*.md", root_dir=ROOT))]


def test_the_readme_is_a_first_visit():
    lines = page("README.md").splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 140
    for name in PAGES[1:]:
        assert f"({name}" in page("README.md"), f"nothing leads to {name}"


def test_the_readmes_first_two_blocks_are_its_two_commands():
    """.ci/run takes them from there."""
    first, second = re.findall(r"```bash\n(.*?)\n```", page("README.md"), re.DOTALL)[:2]
    assert first.endswith("python train_nova.py config/quickstart.py") and second.endswith("pytest tests")


@pytest.mark.parametrize("path", PAGES)
def test_what_a_page_names_is_there(path):
    """Relative links with their headings, files of this repository, and modules that are run with -m."""
    text = re.sub(r"```diff.*?```", "", page(path), flags=re.DOTALL)
    here = os.path.dirname(os.path.join(ROOT, path))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        file, _, heading = link.partition("#")
        target = os.path.normpath(os.path.join(here, file)) if file else os.path.join(ROOT, path)
        assert os.path.exists(target), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", page(os.path.relpath(target, ROOT)), re.M)
            assert heading in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}, link
    own = "config|tests|docs|bench|hub|kernels|launch|store|text|track"
    for name in re.findall(rf"(?<![\w/.<-])((?:{own})/[\w./*-]*\w|\w+\.(?:py|md))(?![\w/])", text):
        there = glob.glob(os.path.join(ROOT, name)) or glob.glob(os.path.join(here, name))
        assert there or name == "__init__.py", f"{name} is not there"
    for module in {*re.findall(r"(?:python[\d.]*|\bbin/python) -m (\w+)", text)} - {"venv", "pytest"}:
        assert os.path.exists(os.path.join(ROOT, module, "__main__.py")), module


def test_the_table_of_settings_is_that_of_settings_py():
    assert page("docs/settings.md") == settings.settings_table(), "python settings.py > docs/settings.md"
    assert page("docs/settings.md").count("\n| `") == len(settings.FIELDS)
