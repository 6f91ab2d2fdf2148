"""The documentation names every setting there is."""

import dataclasses
import re
from pathlib import Path

import pytest

from rankscope.agent.settings import KEYS, SECTION_KEYS, SETTINGS, Key
from rankscope.collector.cli import COMMANDS
from rankscope.collector.config import Config
from rankscope.collector.metrics import METRICS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SECURITY = (DOCS / "security.md").read_text()
CONFIGURATION = (DOCS / "configuration.md").read_text()


def row(name: str) -> str:
    """The table row of a setting in docs/configuration.md."""
    found = re.search(rf"^\| `{re.escape(name)}` \|.*$", CONFIGURATION, re.MULTILINE)
    assert found, f"{name} has no row in docs/configuration.md"
    return found[0]


@pytest.mark.parametrize("key", [*KEYS, *SECTION_KEYS, *SETTINGS], ids=lambda key: key.name)
def test_every_key_is_documented(key: Key) -> None:
    assert key.allowed in row(key.name)
    assert key.help in row(key.name)
    assert not key.variable or f"`{key.variable}`" in row(key.name)


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_every_collector_setting_is_documented(field: "dataclasses.Field[object]") -> None:
    assert f"| `{field.default}` |" in row(f"RANKSCOPE_SERVE_{field.name.upper()}")


def test_every_variable_in_the_code_is_documented() -> None:
    sources = [*ROOT.glob("agent/**/*.py"), *ROOT.glob("collector/**/*.py")]
    name = re.compile(r"(?<!_)RANKSCOPE_[A-Z_]+")
    used = {found for path in sources for found in name.findall(path.read_text())}
    for variable in sorted(used - {"RANKSCOPE_SERVE_"}):
        assert f"`{variable}`" in CONFIGURATION, f"{variable} is not in docs/configuration.md"


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_documented(name: str) -> None:
    kind, _, help_line = METRICS[name]
    ending = "_total" if kind == "counter" and not name.endswith("_total") else ""
    assert re.search(
        rf"^\| `{name}{ending}` \|.*{re.escape(help_line)} \|$", SECURITY, re.MULTILINE
    )


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_between_pages_hold(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("key", [*KEYS, *SECTION_KEYS], ids=lambda key: key.name)
def test_every_key_of_msprobe_is_in_the_page_for_its_users(key: Key) -> None:
    assert f"| `{key.name}` |" in (DOCS / "from-msprobe.md").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_heading_and_exit_status(command: str) -> None:
    text = (DOCS / "commands.md").read_text()
    assert f"\n## rankscope {command}\n" in text
    assert "\n## Exit status\n" in text


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f": {page.relative_to(DOCS)}\n" in text, f"{page.name} is not in mkdocs.yml"


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    for page in sorted(DOCS.rglob("*.md")):
        if page.name != "index.md":
            assert f"({page.relative_to(DOCS)})" in index, f"{page.name} is not in docs/index.md"
