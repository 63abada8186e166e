"""stage_runtime.config: order of sources, faults and what is said about them, addresses and paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from services.acoustic.settings import AcousticSettings
from services.codec.settings import CodecSettings
from services.thinker.settings import ThinkerSettings
from stage_runtime import config
from stage_runtime.config import ConfigError, Settings

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = """
stages:
  thinker: {kind: toy, addresses: ["a:1"]}
  acoustic: {kind: toy, addresses: ["a:2"]}
  codec: {kind: toy, addresses: ["a:3"]}
pipelines: {speech: {}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file with only what must be there."""
    path = tmp_path / "omnistage.yaml"
    path.write_text(MINIMAL)
    return path


def load(file: Path, *overrides: str, **environ: str) -> config.Installation:
    return config.load(file, overrides=overrides, environ=environ)


def refusal(file: Path, *overrides: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, *overrides, **environ)
    return str(caught.value)


def test_the_file_that_comes_with_the_repository_is_right() -> None:
    """The default installation loads, and every stage is a process here."""
    installation = config.load(ROOT / "omnistage.yaml", environ={})

    assert set(installation.stages) == {"thinker", "acoustic", "codec"}
    assert all(len(stage.local_addresses) == 1 for stage in installation.stages.values())


def test_defaults_fill_what_the_file_leaves_out(file: Path) -> None:
    """Listeners are on loopback and sockets for their owner alone unless somebody says otherwise (case C60)."""
    installation = load(file)

    assert installation.router.listen == ("127.0.0.1:50051",)
    assert installation.router.socket_mode == 0o600
    assert installation.stages["codec"].local_addresses == ("a:3",)


def test_environment_wins_over_file_and_flags_win_over_both(file: Path) -> None:
    """The later source counts, key by key."""
    file.write_text(
        MINIMAL + "log: {level: error, format: json}\nrouter: {drain_grace_s: 1, max_message_bytes: 1048576}\n"
    )
    environ = {"OMNISTAGE_LOG__LEVEL": "info", "OMNISTAGE_ROUTER__DRAIN_GRACE_S": "2"}

    from_file = load(file)
    with_environ = load(file, **environ)
    with_flags = load(file, "router.drain_grace_s=3", **environ)

    assert (from_file.log.level, from_file.log.format, from_file.router.drain_grace_s) == ("error", "json", 1)
    assert (with_environ.log.level, with_environ.log.format, with_environ.router.drain_grace_s) == ("info", "json", 2)
    assert (with_flags.log.level, with_flags.router.drain_grace_s) == ("info", 3)
    assert with_flags.router.max_message_bytes == 2**20


def test_values_of_environment_and_flags_are_yaml(file: Path) -> None:
    """Lists, numbers and mappings can be given."""
    installation = load(
        file,
        'stages.codec.addresses=["x:1", "y:2"]',
        "stages.codec.engine={max_batch: 4}",
        OMNISTAGE_ROUTER__LISTEN='["0.0.0.0:1"]',
    )

    assert installation.stages["codec"].addresses == ("x:1", "y:2")
    assert installation.stages["codec"].engine == {"max_batch": 4}
    assert installation.router.listen == ("0.0.0.0:1",)


def test_the_environment_of_the_process_is_read_by_default(file: Path, monkeypatch) -> None:
    """Without `environ` it is os.environ; the variables that are no settings are left alone."""
    monkeypatch.setenv("OMNISTAGE_LOG__LEVEL", "debug")
    monkeypatch.setenv("OMNISTAGE_ADDRESS", "elsewhere:1")
    monkeypatch.setenv("OMNISTAGE_CONFIG", str(file))

    assert config.load().log.level == "debug"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("rooter: {}", "rooter: unknown key"),
        ("router: {lissen: []}", "router.lissen: unknown key"),
        ("router: {lane: {heartbeat: 2}}", "router.lane.heartbeat: unknown key"),
        ("router: {drain_grace_s: -1}", "router.drain_grace_s: Input should be greater than or equal to 0 (got -1)"),
        ("router: {drain_grace_s: soon}", "router.drain_grace_s: Input should be a valid number"),
        ("router: {listen: 127.0.0.1:1}", "router.listen: Input should be a valid tuple (got '127.0.0.1:1')"),
        ("router: {default_model: song}", "router.default_model is 'song'; configured pipelines: ['speech']"),
        ("log: {level: loud}", "log.level: Input should be 'debug', 'info', 'warning' or 'error' (got 'loud')"),
        ("pipelines: {}", "pipelines: Value error, at least one pipeline is needed"),
        ("pipelines: {Speech: {}}", "pipelines.Speech"),
        (
            "pipelines: {speech: {codec: vocoder}}",
            "pipelines.speech.codec names stage 'vocoder'; configured stages: ['",
        ),
        ("pipelines: {speech: {first_chunk_frames: 9, chunk_frames: 8}}", "first_chunk_frames (9) must not exceed"),
        ("pipelines: {speech: {max_frames: 9}}", "default_max_frames (2048) must not exceed max_frames (9)"),
        ("stages: {codec: {kind: toy}}", "stages.codec.addresses: Field required"),
        ("stages: {codec: {kind: toy, addresses: []}}", "stages.codec.addresses"),
        ("stages: {codec: {kind: toy, addresses: [a:1], module: a-b}}", "stages.codec.module"),
        ("stages: {codec: {kind: toy, addresses: ['unix:']}}", "'unix:' names no socket"),
    ],
)
def test_faults_are_refused_with_place_and_reason(file: Path, extra: str, said: str) -> None:
    """The message names the file, the key, the value and what would be right."""
    tree = yaml.safe_load(MINIMAL)
    for key, value in yaml.safe_load(extra).items():
        tree[key] = tree.get(key, {}) | value if key != "pipelines" else value
    file.write_text(yaml.safe_dump(tree))

    message = refusal(file)

    assert said in message
    assert str(file) in message or "unix:" in said


def test_all_faults_are_told_at_once(file: Path) -> None:
    """Nobody has to start the program once for each of them."""
    file.write_text(MINIMAL + "log: {level: loud}\nrouter: {drain_grace_s: -1, nonsense: 1}\n")

    message = refusal(file)

    assert [part in message for part in ("log.level", "router.drain_grace_s", "router.nonsense")] == [True] * 3


def test_a_fault_from_outside_the_file_names_its_source(file: Path) -> None:
    """Otherwise one would look for it in the file in vain."""
    assert "nonsense: unknown key [environment variable OMNISTAGE_NONSENSE]" in refusal(file, OMNISTAGE_NONSENSE="1")
    assert "(got 'loud') [--set log.level]" in refusal(file, "log.level=loud")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("log.level", "must have the form key.key=value"),
        ("=x", "must have the form key.key=value"),
        ("log.level=[", "is not valid YAML"),
        ("run_dir.x=1", "run_dir is not a group of settings"),
    ],
)
def test_faulty_flags_are_refused(file: Path, flag: str, said: str) -> None:
    """With the flag and what is wrong with it."""
    file.write_text(MINIMAL + "run_dir: run\n")

    assert said in refusal(file, flag)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "must hold a mapping"),
        ("[1]", "must hold a mapping"),
        ("a: [", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
    ids=["empty", "list", "broken YAML", "no text"],
)
def test_a_file_that_is_no_settings_file_is_refused(file: Path, content: str | bytes, said: str) -> None:
    """With its name."""
    file.write_bytes(content if isinstance(content, bytes) else content.encode())

    message = refusal(file)

    assert said in message
    assert str(file) in message


def test_a_missing_file_is_refused_with_the_ways_to_name_one(tmp_path: Path, monkeypatch) -> None:
    """Named by argument, by environment, or the default in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMNISTAGE_CONFIG", raising=False)

    for path in (tmp_path / "none.yaml", None):
        with pytest.raises(ConfigError, match="does not exist; name one with --config or OMNISTAGE_CONFIG"):
            config.load(path)


def test_an_unknown_stage_is_refused_with_the_known_ones(file: Path) -> None:
    """For `--stage` of a stage process."""
    with pytest.raises(ConfigError, match=r"no stage 'vocoder' in the settings; configured stages: \['acoustic'"):
        load(file).stage("vocoder")


def test_paths_are_relative_to_the_file(file: Path, tmp_path: Path, monkeypatch) -> None:
    """Wherever the process was started; `unix:x` and `unix://x` are the same socket."""
    monkeypatch.chdir("/")
    installation = load(
        file,
        "run_dir=run",
        "stages.codec.model=models/m",
        'stages.codec.addresses=["unix:a.sock", "unix://a.sock", "unix:/b.sock", "unix:///b.sock", "c:1"]',
        'stages.codec.listen=["unix:sub/a.sock"]',
        'router.listen=["unix:r.sock"]',
    )
    codec = installation.stages["codec"]

    assert installation.run_dir == tmp_path / "run"
    assert codec.model == tmp_path / "models/m"
    here = f"unix:{tmp_path}/a.sock"
    assert codec.addresses == (here, here, "unix:/b.sock", "unix:/b.sock", "c:1")
    assert codec.local_addresses == (f"unix:{tmp_path}/sub/a.sock",)
    assert installation.router.listen == (f"unix:{tmp_path}/r.sock",)


@pytest.mark.parametrize("where", ["router.listen", "stages.codec.addresses", "stages.codec.listen"])
def test_socket_paths_that_are_too_long_are_refused_with_their_length(file: Path, where: str) -> None:
    """Every place where a socket can stand is checked, in bytes."""
    message = refusal(file, f'{where}=["unix:/{"ö" * 60}"]')

    assert "has 121 bytes; Unix sockets allow 107" in message


def test_settings_survive_being_printed(file: Path, tmp_path: Path) -> None:
    """What `--print-config` shows is a settings file of the same installation."""
    installation = load(file, "router.socket_mode=432", "stages.codec.model=models/m")
    printed = tmp_path / "printed.yaml"
    printed.write_text(config.dump(installation))

    assert load(printed) == installation


def test_settings_cannot_be_changed(file: Path) -> None:
    """They are read once and the same for everybody."""
    with pytest.raises(ValidationError):
        load(file).router.drain_grace_s = 5


def test_nothing_else_reads_the_environment_for_settings() -> None:
    """`os.environ` appears only where it is about other things than settings."""
    allowed = {
        "stage_runtime/config.py",  # the settings
        "stage_runtime/child.py",  # passes it on
    }
    readers = {
        str(path.relative_to(ROOT))
        for package in ("stage_runtime", "services")
        for path in (ROOT / package).rglob("*.py")
        if "os.environ" in path.read_text() or "getenv(" in path.read_text()
    }

    assert readers <= allowed


# --- docs/reference/settings.md


def models() -> dict[str, type[Settings]]:
    """Every settings model by the heading of its table in the reference."""
    return {
        "The file": config.Installation,
        "`log`": config.LogSettings,
        "`router`": config.RouterSettings,
        "`router.lane`": config.LaneSettings,
        "`pipelines.NAME`": config.SpeechPipelineSettings,
        "`stages.NAME`": config.StageSettings,
        "`stages.NAME.engine` of kind `voxtral.thinker`": ThinkerSettings,
        "`stages.NAME.engine` of kind `voxtral.acoustic`": AcousticSettings,
        "`stages.NAME.engine` of kind `voxtral.codec`": CodecSettings,
    }


def shown(model: type[Settings], name: str) -> str:
    """A default as the reference shows it."""
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Settings):
        return "see below"
    if name == "socket_mode":
        return f"`{default:04o}`"
    if default is None:
        return "unset"
    return f"`{json.dumps(default, default=str)}`".replace('`"', "`").replace('"`', "`") if default != "" else "empty"


def tables() -> dict[str, dict[str, tuple[str, str]]]:
    """Tables of the reference: heading, then key to default and meaning."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    heading = ""
    for line in (ROOT / "docs" / "reference" / "settings.md").read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| `") and not line.startswith("| `OMNISTAGE"):
            key, default, meaning = (cell.strip() for cell in line.strip("|").split(" | "))
            found.setdefault(heading, {})[key.strip("` ")] = (default, meaning.rstrip(" |"))
    return found


def test_the_reference_has_a_table_for_every_model() -> None:
    """And none that does not exist."""
    assert tables().keys() == models().keys()


@pytest.mark.parametrize("heading", models())
def test_the_reference_has_every_key_with_its_default_and_meaning(heading: str) -> None:
    """Exactly the keys of the model, with the defaults that are in force."""
    model = models()[heading]
    rows = tables()[heading]

    assert set(rows) == set(model.model_fields)
    assert {key: default for key, (default, _) in rows.items()} == {
        key: shown(model, key) for key in model.model_fields
    }
    assert all(meaning.endswith(".") for _, meaning in rows.values())
