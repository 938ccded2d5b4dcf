"""The host's names that the adapter relies on, in the versions that it supports; nothing of them is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rl_safe_workers.adapters.host_contract import HostName, HostText, lacks_name, lacks_text, package_root
from rl_safe_workers.adapters.swift.swift_contract import (
    BRIDGE_NAMES,
    BRIDGE_TEXTS,
    GRPO_NAMES,
    GRPO_TEXTS,
    NAMES,
    PROOF_NAMES,
    PROOF_TEXTS,
    RAY_NAMES,
    RAY_TEXTS,
    SINCE,
    TEXTS,
    check_grpo,
    check_proved,
    check_ray_mode,
    check_swift,
)
from rl_safe_workers.errors import ConfigError

HOSTS = Path(sys.prefix) / "hosts"
"""A folder with the source of each other version, which scripts/setup makes."""
SUPPORTED = (SINCE, "4.4.2", "4.5.2")
"""Besides the one that is installed."""
EVERY_NAME, EVERY_TEXT = (
    (*NAMES, *GRPO_NAMES, *PROOF_NAMES, *RAY_NAMES),
    (*TEXTS, *GRPO_TEXTS, *PROOF_TEXTS, *RAY_TEXTS),
)
TOO_OLD = ("4.1.0", "4.2.0")
CHECKOUTS = [path for path in os.environ.get("SWIFT_SRC", "").split(os.pathsep) if path]
"""More sources, such as that of 4.4.3, which the package index lacks."""


@pytest.fixture(params=(*SUPPORTED, *CHECKOUTS), ids=lambda path: Path(path).name)
def supported(request: pytest.FixtureRequest) -> Path:
    return HOSTS / request.param  # an absolute path stays itself


def test_a_supported_version_has_every_name(supported: Path) -> None:
    assert [lack for expected in EVERY_NAME if (lack := lacks_name(supported, expected))] == []


def test_a_supported_version_does_what_we_rely_on(supported: Path) -> None:
    assert [lack for expected in EVERY_TEXT if (lack := lacks_text(supported, expected))] == []


def test_the_installed_hosts_are_taken() -> None:
    check_swift(package_root("swift"), package_root("mcore_bridge"))
    check_grpo(package_root("swift"))
    check_proved(package_root("swift"))
    check_ray_mode(package_root("swift"))


@pytest.mark.parametrize("version", TOO_OLD)
def test_an_older_version_is_refused_by_the_name_that_it_lacks(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"lacks MegatronArguments\._init_distributed \(.*use ms-swift {SINCE} to"):
        check_swift(HOSTS / version, package_root("mcore_bridge"))


def test_the_pages_say_the_oldest_version_that_is_read() -> None:
    root = Path(__file__).parents[2]
    assert f"**ms-swift** {SINCE} or newer" in (root / "README.md").read_text()
    assert f"[{SINCE} and newer](#versions)" in (root / "docs" / "swift.md").read_text()


def test_a_bridge_that_makes_its_groups_otherwise_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "mcore_bridge" / "bridge" / "gpt_bridge.py"
    source.parent.mkdir(parents=True)
    source.write_text("class GPTBridge:\n    def __init__(self, config): ...\n")
    with pytest.raises(ConfigError, match="mcore-bridge in .* lacks 'if EP_PP_GROUP is None'"):
        check_swift(package_root("swift"), tmp_path)


def test_the_page_lists_every_name_and_what_the_host_must_do() -> None:
    page = (Path(__file__).parents[2] / "docs" / "swift_internals.md").read_text()
    for name in (*EVERY_NAME, *BRIDGE_NAMES):
        assert isinstance(name, HostName)
        signature = f"({', '.join(name.parameters)})" if name.parameters else ""
        assert f"| {name.file} | `{name.name}{signature}` | {name.why} |" in page
    for text in (*EVERY_TEXT, *BRIDGE_TEXTS):
        assert isinstance(text, HostText)
        assert f"| {text.file} | `{text.text}` | {text.why} |" in page
