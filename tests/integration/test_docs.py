"""The documentation: its code runs, its links lead somewhere, and its tables agree with the code."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import fedkeep
from support.methods import METHODS
from support.problems import Problem, gap
from typer.testing import CliRunner

import fedkeep as fk
from fedkeep import tree
from fedkeep._util import own_parts
from fedkeep.cli.app import app
from fedkeep.runs.round_metrics import BY_CLASS, SCALARS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    page for top in ("", "docs/**/", "examples/**/", "results/**/", "fedkeep/**/") for page in ROOT.glob(f"{top}*.md")
)
HEADINGS = [
    "Formula", "Hyperparameters", "Choices and deviations", "What it needs and discloses", "When it helps", "Warnings",
    "Reference",
]  # fmt: skip


def run_python(page: Path) -> dict[str, object]:
    """Run a page's Python blocks in one namespace and return it."""
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(block, names)
    return names


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the files that a page links to, each with its anchor."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    split = [target.partition("#") for target in targets]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in split]


def test_python_of_the_readme_runs() -> None:
    history = run_python(ROOT / "README.md")["history"]
    assert isinstance(history, fk.History)
    assert history.method == "near"


@pytest.mark.parametrize("name", ["fedavg", "fedntd", "scaffold", "feddyn", "moon", "sam"])
def test_the_round_on_the_contract_page_is_what_the_engine_does(problem: Problem, name: str) -> None:
    method = METHODS[name]()
    sim = problem.simulation(method, rounds=2)
    run_round = run_python(DOCS / "contract.md")["run_round"]
    server, clients = sim.server, {}
    for number in (1, 2):
        jobs = [sim.planner.job(k, number) for k in sim.planner.cohort(number)[0]]
        lr = sim.settings.lr_in(number)
        data = {job.id: (sim.eval_inputs(sim.x[job.examples]), sim.y[job.examples]) for job in jobs}
        plan = {job.id: [row[:n] for row, n in zip(job.plan.index, job.plan.size, strict=True)] for job in jobs}
        once = {job.id: job.plan.one_pass for job in jobs}
        facts = {job.id: tree.take(sim.local.facts([job.plan], job.counts[None], lr), 0) for job in jobs}
        server = run_round(method, sim.task, server, clients, data, plan, once, facts, sim.task.optimizer, lr, number)
    sim.run()
    assert gap(sim.server, server) < 1e-12


def test_python_of_add_a_method_runs() -> None:
    history = run_python(DOCS / "add-a-method.md")["history"]
    assert isinstance(history, fk.History)
    assert history.method == "fedadam"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        assert file.exists(), f"{page.name} links to {file}"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{page.name} links to {file}#{anchor}"


def test_the_index_lists_every_page() -> None:
    listed = {file for file, _ in links(DOCS / "index.md")}
    assert [page for page in PAGES if page.is_relative_to(DOCS) and page not in listed] == [DOCS / "index.md"]


def test_the_readme_names_every_method() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in fk.methods.REGISTRY if f"| `{name}` |" not in text] == []


def test_the_contract_page_names_every_hook() -> None:
    text = (DOCS / "contract.md").read_text()
    assert [hook for hook in fk.method.HOOKS if f"{hook}(" not in text] == []


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
def test_a_methods_page_agrees_with_its_declaration(name: str) -> None:
    """Every page has the same headings, and its table has exactly the declared hyperparameters and defaults."""
    text = (DOCS / "methods" / f"{name}.md").read_text()
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == HEADINGS
    section = text.partition("## Hyperparameters\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", section, flags=re.MULTILINE)
    assert {key: ast.literal_eval(value.strip()) for key, value in rows} == fk.methods.get(name).defaults()


def test_the_architecture_page_names_files_and_functions_that_exist() -> None:
    """`path.py` is a file of the package or the repository, `path.py:A.b` a definition in it."""
    text = (DOCS / "architecture.md").read_text()
    for path, name in re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", text):
        file = next((root / path for root in (ROOT / "fedkeep", ROOT) if (root / path).exists()), None)
        assert file, path
        scope: ast.AST = ast.parse(file.read_text())
        for part in filter(None, name.split(".")):
            inside = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == part]
            assert inside, f"{path}:{name}"
            scope = inside[0]


def run_page(name: str, folder: Path) -> None:
    """Run a page in a folder: shell blocks as commands, TOML as the file first.toml, Python in one namespace."""
    text = (DOCS / name).read_text()
    names: dict = {}
    for kind, block in re.findall(r"```(sh|toml|python)\n(.*?)```", text, flags=re.DOTALL):
        if kind == "toml":
            (folder / "first.toml").write_text(block)
        elif kind == "python":
            exec(block, names)
        else:
            for line in block.strip().splitlines():
                name, *args = line.split()
                assert name == "fedkeep", line
                done = fedkeep(*args)
                assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.mark.parametrize("name", ["callbacks.md", "notebooks.md", "optimisers.md"])
def test_the_python_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(DOCS / name)


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("tutorial.md", tmp_path)
    assert (tmp_path / "split.svg").exists()
    assert (tmp_path / "report.html").exists()
    assert {"first", "mine", "own-model"} <= {p.name for p in (tmp_path / "runs").iterdir()}


def test_the_page_on_experiments_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(own_parts, "_trusted", set())
    module = re.search(r"```python\n(# my_parts.py\n.*?)```", (DOCS / "experiments.md").read_text(), flags=re.DOTALL)
    assert module
    (tmp_path / "my_parts.py").write_text(module[1])
    run_page("experiments.md", tmp_path)
    sys.modules.pop("my_parts")
    assert fk.load_run("runs/mine").records[-1]["round"] == 5
    assert (tmp_path / "first.html").exists()


def test_the_profiling_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("profiling.md", tmp_path)
    assert (tmp_path / "trace.json.gz").exists()
    assert list((tmp_path / "runs").glob("*/trace.json.gz"))


def test_the_metrics_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("metrics.md", tmp_path)
    text = (DOCS / "metrics.md").read_text()
    assert [name for name in (*SCALARS, *BY_CLASS) if f"| `{name}`" not in text] == []


def test_the_page_on_migration_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("migration.md", tmp_path)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"from-pfllib", "from-fl-bench"}


def test_the_page_on_migration_names_what_exists() -> None:
    """Methods, hyperparameters, settings and kinds of split in our columns."""
    text = (DOCS / "migration.md").read_text()
    rows = [
        line.strip("|").split("|") for line in text.partition("## Methods")[2].splitlines() if line.startswith("| ")
    ]
    named = {}
    for *_, ours, _, here in rows[1:]:
        method, *options = re.findall(r"`(\w+)(?:=\w+)?`", ours)[:2] or [""]
        if method in fk.methods.REGISTRY:
            named[method] = {*options, *re.findall(r"`(\w+)`", here)}
    assert len(named) == 14
    for method, hyperparameters in named.items():
        assert hyperparameters <= set(fk.methods.get(method).defaults()), method
    settings = text.partition("## Settings")[2].partition("## Splits")[0]
    ours = re.findall(r"\| `([\w.]+)`[^|]*\|$", settings, flags=re.MULTILINE)
    fields = {field.name for field in dataclasses.fields(fk.Settings)}
    assert {name for name in ours if "." not in name} - {"model"} <= fields
    for kind in re.findall(r"`split=(\w+)", text):
        assert kind == "file" or hasattr(fk.data.partition, kind)


def test_the_page_on_gpu_use_runs_and_cites_measured_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("gpu-use.md", tmp_path)
    measured = (DOCS / "benchmarks.md").read_text()
    text = (DOCS / "gpu-use.md").read_text()
    shown = {
        "plain script, TF32": "plain PyTorch script, client after client",
        "loop, TF32": "fedkeep, loop",
        "stacked, TF32": "fedkeep, stacked",
    }
    for line, name in shown.items():
        [ms] = re.findall(rf"^  {line} +([\d.]+) ms", measured, flags=re.MULTILINE)
        assert f"| {name} | {float(ms):,.0f} |" in text


def test_gpu_use_refuses_clearly_and_watches_any_command(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu_use.py")]

    def run(*args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{path or tmp_path / 'nothing'}", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(
            [*script, *args], capture_output=True, text=True, timeout=120, check=False, env=environment
        )

    for args, reason in (([], "no CUDA device"), (["--", "x"], "nvidia-smi is not available"), (["--"], "no command")):
        done = run(*args)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert reason in done.stderr
    monitor = tmp_path / "nvidia-smi"  # two GPUs, of which one is idle
    monitor.write_text(f"#!{sys.executable}\nprint('0')\nprint('40')\n")
    monitor.chmod(0o755)
    sleep = [sys.executable, "-c", "import sys, time; time.sleep(0.3); sys.exit(3)"]
    done = run("--interval", "0.05", "--", *sleep, path=tmp_path)
    assert done.returncode == 3, "as the command"
    first, second = done.stdout.splitlines()
    assert "GPU 0: busy 0% of the time, idle in 100%" in first
    assert "GPU 1: busy 40% of the time, idle in 0%" in second


def test_the_page_on_model_cards_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("model-cards.md", tmp_path)
    assert "mean over 2 seeds" in (tmp_path / "my-model" / "README.md").read_text()


def test_the_page_on_averaged_weights_runs(tmp_path: Path) -> None:
    run_page("average-weights.md", tmp_path)


def test_the_page_on_recoverable_forgetting_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("recoverable-forgetting.md", tmp_path)
    assert "recoverable_share" in (tmp_path / "recover.csv").read_text()


def test_the_example_of_heterogeneity_runs() -> None:
    """The other examples of this page need data sets that are not there."""
    section = (DOCS / "data.md").read_text().partition("### How different the clients are")[2].partition("\n### ")[0]
    [block] = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    names: dict = {"fk": fk}
    exec(block, names)
    assert [field for field in names["numbers"] if f"| `{field}` |" not in section] == []


def test_the_page_on_your_own_data_runs(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("pyarrow", reason="tables need the extra data")
    run_page("your-data.md", tmp_path)


def test_the_page_on_personalisation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("personalisation.md", tmp_path)
    assert "personal_own_worst_tenth" in (tmp_path / "personal.csv").read_text()


def test_the_instruments_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    pytest.importorskip("pyarrow", reason="Parquet needs the extra data")
    monkeypatch.chdir(tmp_path)
    run_page("instruments.md", tmp_path)
    assert {"tsne.pdf", "surface.png", "accuracy.pdf", "where.png"} <= {
        p.name for p in (tmp_path / "figures").iterdir()
    }


def test_the_instruments_page_names_every_measure_and_study() -> None:
    text = (DOCS / "instruments.md").read_text()
    known = [n for n, f in vars(fk.forgetting).items() if callable(f) and not n.startswith("_")]
    helpers = {"Any", "Sequence", "accuracy", "class_accuracy", "smoothed", "underlying_distribution"}
    assert [name for name in [*known, *fk.instruments.STUDIES] if name not in helpers and f"`{name}" not in text] == []


def test_the_first_comparison_of_the_readme_shows_the_runs_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best on two shards first, with one digit less than on the page of results."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FEDKEEP_DATA", "nowhere")
    result = CliRunner().invoke(app, shlex.split("reproduce fedkeep/table-1 --seeds 3 --show --json --runs results"))
    methods: dict[str, list[dict]] = {}
    for column in json.loads(result.stdout)["columns"]:
        for row in column["rows"]:
            methods.setdefault(row["label"], []).append(row["measures"])
    expected = []
    for name, columns in sorted(methods.items(), key=lambda item: -item[1][0]["smoothed"]["ours"]):
        cells = []
        for one in columns:
            accuracy = f"{one['smoothed']['ours']:.1f}±{one['smoothed']['spread']:.1f}"
            cells.append(f"{accuracy} / {one['forgetting']['ours']:.2f}")
        expected.append(f"| {name} | {' | '.join(cells)} |")
    section = (ROOT / "README.md").read_text().partition("## How FedKeep compares")[2].partition("##")[0]
    assert [line.replace("**", "") for line in section.splitlines() if line.startswith("|")][2:] == expected


@pytest.mark.parametrize(("name", "n_tables"), [("results.md", 20), ("recoverable-forgetting.md", 2)])
def test_pages_of_results_show_the_runs_in_the_repository(
    name: str, n_tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FEDKEEP_DATA", "nowhere")
    page = (DOCS / name).read_text()
    tables = r"((?:(?:\|.*|\*\*\S+  .*\*\*|)\n)+)"  # with headings, if there are several
    shown = re.findall(rf"```sh\n(fedkeep reproduce .* --show .*)\n```\n\n{tables}", page)
    assert len(shown) == n_tables
    for command, table in shown:
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, result.output
        figures = result.stdout.partition("Comparisons that fedkeep makes")[0]  # the ledger has those
        lines = [line for line in figures.splitlines() if line.startswith(("|", "**"))]
        if "**" not in table:
            lines = [line for line in lines if line.startswith("|")]
        assert lines == [line for line in table.splitlines() if line]
