"""Settings: one YAML file for a whole installation; every process reads its own part.

Order, later wins: file, environment (`OMNISTAGE_ROUTER__LISTEN='["0.0.0.0:50051"]'`), flags (`--set router.listen=...`). Unknown
keys are errors. Nothing else in the project reads the environment for settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

ENV_PREFIX = "OMNISTAGE_"
# Variables with our prefix that are no settings: the client's default address and the path of the settings file.
ENV_OTHERS = {"OMNISTAGE_ADDRESS", "OMNISTAGE_CONFIG"}
DEFAULT_FILE = "omnistage.yaml"

UNIX_PATH_LIMIT = 107

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
Port = Annotated[str, Field(min_length=1)]


class ConfigError(Exception):
    """The settings are faulty; the message lists every fault with its place."""


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LogSettings(Settings):
    """How processes log."""

    format: Literal["console", "json"] = "console"
    level: Literal["debug", "info", "warning", "error"] = "info"


class LaneSettings(Settings):
    """Timing of the lane between router and stage."""

    heartbeat_interval_s: float = Field(2.0, ge=0.1, le=60)
    missed_heartbeats: int = Field(3, ge=1, le=100, description="after this many the replica counts as lost")
    engine_stall_s: float = Field(
        60.0, gt=0, description="an engine whose step counter stands still this long with work ready counts as hung"
    )
    connect_timeout_s: float = Field(5.0, gt=0)
    backoff_initial_s: float = Field(0.25, gt=0)
    backoff_max_s: float = Field(5.0, gt=0)
    resolve_interval_s: float = Field(5.0, gt=0, description="dns:/// names are looked up again this often")


class ServerSettings(Settings):
    """What every process that serves gRPC needs."""

    drain_grace_s: float = Field(30.0, ge=0, description="on SIGTERM requests in flight may finish this long")
    reflection: bool = True
    max_message_bytes: int = Field(64 * 2**20, ge=2**20, le=2**31 - 1)
    socket_mode: int = Field(0o600, ge=0, le=0o777)


class RouterSettings(ServerSettings):
    """The router process."""

    listen: tuple[Port, ...] = ("127.0.0.1:50051",)
    admin: bool = Field(default=True, description="serve PipelineService")
    lane: LaneSettings = LaneSettings()
    default_model: str = Field("", description="pipeline that requests without `model` use; empty: the only one")


class SpeechPipelineSettings(Settings):
    """A speech pipeline: which stages fill its roles, its chunk plan and its limits."""

    kind: Literal["speech"] = "speech"
    thinker: Name = "thinker"
    acoustic: Name = "acoustic"
    codec: Name = "codec"
    first_chunk_frames: int = Field(5, ge=1, description="new frames of a chunk until chunk_frames were made")
    chunk_frames: int = Field(25, ge=1)
    context_frames: int = Field(25, ge=0, description="left context of a chunk; at least the codec's reach")
    max_concurrent: int = Field(64, ge=1)
    max_queued: int = Field(256, ge=0)
    max_text_characters: int = Field(4096, ge=1)
    max_frames: int = Field(4096, ge=1)
    default_max_frames: int = Field(2048, ge=1)
    default_cfg_alpha: float = Field(1.2, ge=0, le=10)
    stream_buffer_chunks: int = Field(4, ge=1, description="audio chunks held for a client that reads slowly")
    client_stall_s: float = Field(30.0, gt=0, description="a client that reads nothing this long is dropped")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.first_chunk_frames > self.chunk_frames:
            raise ValueError(
                f"first_chunk_frames ({self.first_chunk_frames}) must not exceed chunk_frames ({self.chunk_frames})"
            )
        if self.default_max_frames > self.max_frames:
            raise ValueError(
                f"default_max_frames ({self.default_max_frames}) must not exceed max_frames ({self.max_frames})"
            )
        return self

    def roles(self) -> dict[str, str]:
        """Role to stage name, in the order data flows."""
        return {"thinker": self.thinker, "acoustic": self.acoustic, "codec": self.codec}


class StageSettings(ServerSettings):
    """One stage: what it runs and where its replicas are. `engine` holds the settings of its kind."""

    kind: str = Field(min_length=1)
    addresses: tuple[Port, ...] = Field(
        min_length=1, description="what the router dials: host:port, unix:path, dns:///name:port"
    )
    listen: tuple[Port, ...] | None = Field(
        None, description="one process for each, started by `omnistage up`; unset: the addresses; empty: none here"
    )
    module: str = Field(
        "",
        pattern=r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?$",
        description="Python module that `omnistage up` runs for it; empty: the one of its kind",
    )
    model: Path | None = None
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(1, ge=1, description="torch threads of each process")
    batch_invariant: bool = Field(default=True, description="bit-equal results whatever shares the batch")
    max_queued: int = Field(256, ge=0, description="requests waiting for admission; one more is refused")
    engine: dict[str, Any] = Field(default_factory=dict)

    @property
    def local_addresses(self) -> tuple[str, ...]:
        """Addresses of the processes that `omnistage up` starts."""
        return self.addresses if self.listen is None else self.listen


class Installation(Settings):
    """A whole installation."""

    run_dir: Path = Path("out/run")
    log: LogSettings = LogSettings()
    router: RouterSettings = RouterSettings()
    stages: dict[Name, StageSettings]
    pipelines: dict[Name, SpeechPipelineSettings]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, pipeline in self.pipelines.items():
            for role, stage in pipeline.roles().items():
                if stage not in self.stages:
                    raise ValueError(
                        f"pipelines.{name}.{role} names stage {stage!r}; configured stages: {sorted(self.stages)}"
                    )
        default = self.router.default_model
        if default and default not in self.pipelines:
            raise ValueError(f"router.default_model is {default!r}; configured pipelines: {sorted(self.pipelines)}")
        return self

    @field_validator("pipelines")
    @classmethod
    def _some(cls, value: dict[str, SpeechPipelineSettings]) -> dict[str, SpeechPipelineSettings]:
        if not value:
            raise ValueError("at least one pipeline is needed")
        return value

    def stage(self, name: str) -> StageSettings:
        """Settings of a stage; raises ConfigError if there is none of that name."""
        try:
            return self.stages[name]
        except KeyError:
            raise ConfigError(f"no stage {name!r} in the settings; configured stages: {sorted(self.stages)}") from None


def find_file(path: str | Path | None) -> Path:
    """The settings file: `path`, else OMNISTAGE_CONFIG, else ./omnistage.yaml. Raises ConfigError if it does not exist."""
    chosen = Path(path or os.environ.get("OMNISTAGE_CONFIG") or DEFAULT_FILE)
    if not chosen.is_file():
        raise ConfigError(f"settings file {chosen} does not exist; name one with --config or OMNISTAGE_CONFIG")
    return chosen


def load(
    path: str | Path | None = None, *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Installation:
    """Read the settings of an installation. Relative paths in it are relative to the file's folder.

    Args:
        path: The YAML file; see `find_file`.
        overrides: Flags of the form "router.listen=[...]"; values are YAML.
        environ: The environment; None for the process's own.

    Raises:
        ConfigError: The file is missing, is no YAML mapping, or has a faulty or unknown key.
    """
    file = find_file(path)
    try:
        tree = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must hold a mapping of settings, not {type(tree).__name__}")
    sources: dict[tuple[str, ...], str] = {}
    for source, name, keys, value in (
        *_from_environ(os.environ if environ is None else environ),
        *_from_flags(overrides),
    ):
        _put(tree, keys, value, f"{source} {name}")
        sources[tuple(keys)] = f"{source} {name}"
    try:
        installation = Installation.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{file}: {describe(error, sources)}") from error
    return _resolve(installation, file.resolve().parent)


def describe(error: ValidationError, sources: Mapping[tuple[str, ...], str] | None = None) -> str:
    """All faults of a validation error in one line: place, fault, value, and where a value from outside the file is from."""
    faults = []
    for fault in error.errors():
        place = tuple(map(str, fault["loc"]))
        got = (
            "" if fault["type"] in {"missing", "extra_forbidden"} or not fault["loc"] else f" (got {fault['input']!r})"
        )
        message = "unknown key" if fault["type"] == "extra_forbidden" else fault["msg"]
        source = next((f" [{name}]" for keys, name in (sources or {}).items() if place[: len(keys)] == keys), "")
        faults.append(f"{'.'.join(place) or 'settings'}: {message}{got}{source}")
    return "; ".join(faults)


def dump(installation: Installation) -> str:
    """The settings in force, as YAML (`--print-config`)."""
    return yaml.safe_dump(installation.model_dump(mode="json"), sort_keys=False)


_Override = tuple[str, str, list[str], Any]


def _from_environ(environ: Mapping[str, str]) -> list[_Override]:
    found: list[_Override] = []
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and name not in ENV_OTHERS:
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            found.append(("environment variable", name, keys, _value(text, name)))
    return found


def _from_flags(overrides: Sequence[str]) -> list[_Override]:
    found: list[_Override] = []
    for flag in overrides:
        name, equals, text = flag.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {flag}: must have the form key.key=value")
        found.append(("--set", name, name.split("."), _value(text, name)))
    return found


def _value(text: str, name: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {text!r} is not valid YAML: {error}") from error


def _put(tree: dict[str, Any], keys: Sequence[str], value: Any, source: str) -> None:
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{source}: {key} is not a group of settings")
        node = child
    node[keys[-1]] = value


def check_socket_path(path: Path) -> None:
    """Raise ConfigError if a Unix socket's path is too long, or has characters that gRPC would read differently."""
    if "%" in str(path) or not str(path).isprintable():
        raise ConfigError(f"socket path {str(path)!r} has '%' or an unprintable character; choose another path")
    length = len(os.fsencode(path))
    if length > UNIX_PATH_LIMIT:
        raise ConfigError(
            f"socket path {path} has {length} bytes; Unix sockets allow {UNIX_PATH_LIMIT}: choose a shorter folder"
        )


def _resolve(installation: Installation, base: Path) -> Installation:
    def address(text: str) -> str:
        if not text.startswith("unix:"):
            return text
        if text.rstrip("/") == "unix:":
            raise ConfigError(f"address {text!r} names no socket; write unix:/path/to/socket")
        path = base / text.removeprefix("unix:").removeprefix("//")
        check_socket_path(path)
        return f"unix:{path}"

    stages = {
        name: stage.model_copy(
            update={
                "model": None if stage.model is None else base / stage.model,
                "addresses": tuple(map(address, stage.addresses)),
                "listen": None if stage.listen is None else tuple(map(address, stage.listen)),
            }
        )
        for name, stage in installation.stages.items()
    }
    router = installation.router.model_copy(update={"listen": tuple(map(address, installation.router.listen))})
    return installation.model_copy(update={"stages": stages, "router": router, "run_dir": base / installation.run_dir})
