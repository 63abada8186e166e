"""Which processes of an installation run on this machine, and how they are started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stage_runtime import addresses
from stage_runtime.addresses import SocketGuard, TcpAddress, UnixAddress
from stage_runtime.config import ConfigError, Installation, ServerSettings, StageSettings

ROUTER = "router"
ROUTER_MODULE = "services.router"
# Modules of the kinds that this distribution brings; for others the settings name one.
STAGE_MODULES = {
    "voxtral.thinker": "services.thinker",
    "voxtral.acoustic": "services.acoustic",
    "voxtral.codec": "services.codec",
}

# Beyond its grace period a process needs time to say farewell and to end.
_STOP_MARGIN_S = 5.0
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not listened on


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process: its name for people and log files, its command, and the address that its health is asked at.

    `stage` is the stage it serves a replica of, "" for the router. `stop_s` is how long it may take to stop in order.
    """

    name: str
    stage: str
    command: tuple[str, ...]
    listen: tuple[str, ...]
    address: str
    stop_s: float


def plan(
    installation: Installation, config_file: Path, *, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> list[ProcessPlan]:
    """The router and one process for each local address of each stage.

    Args:
        installation: The settings, with `overrides` in force.
        config_file: The file they came from; every process reads it again.
        overrides: `--set` flags, which every process gets too.
        only: Names of stages, or "router", to leave out all others; empty: all.

    Raises:
        ConfigError: `only` names something unknown, a stage's module is unknown, or an address cannot be listened on.
    """
    known = [ROUTER, *installation.stages]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ConfigError(f"nothing is called {', '.join(unknown)} here; there are: {', '.join(known)}")
    chosen = set(only or known)
    common = ["--config", str(config_file.resolve()), *(part for flag in overrides for part in ("--set", flag))]
    plans: list[ProcessPlan] = []
    if ROUTER in chosen:
        command = (*_python(ROUTER_MODULE), *common)
        plans.append(_plan(ROUTER, "", command, installation.router.listen, installation.router))
    for name, stage in installation.stages.items():
        if name in chosen:
            plans += _stage_plans(name, stage, common)
    if not plans:
        raise ConfigError(f"nothing of {', '.join(chosen)} runs on this machine: `listen` is empty")
    return plans


def check_free(plans: Sequence[ProcessPlan]) -> None:
    """Raise AddressInUse if another process listens on an address of the plans; sockets of dead processes are removed."""
    for each in plans:
        for text in each.listen:
            match addresses.parse(text):
                case UnixAddress() as address:
                    SocketGuard(address).release()
                case TcpAddress() as address:
                    addresses.resolve(address)


def _stage_plans(name: str, stage: StageSettings, common: Sequence[str]) -> list[ProcessPlan]:
    module = stage.module or STAGE_MODULES.get(stage.kind)
    if module is None:
        raise ConfigError(
            f"stages.{name}.kind is {stage.kind!r}, whose program is unknown; name its Python module in "
            f"stages.{name}.module. Kinds that need none: {', '.join(STAGE_MODULES)}"
        )
    listen = stage.local_addresses
    foreign = [address for address in listen if address.startswith("dns:")]
    if foreign:
        raise ConfigError(
            f"stages.{name}.addresses has {foreign[0]!r}, where no process can listen; say in stages.{name}.listen what "
            "is to be started here ([] for nothing)"
        )
    return [
        _plan(
            name if len(listen) == 1 else f"{name}-{index}",
            name,
            (*_python(module), *common, "--stage", name, "--listen", address),
            (address,),
            stage,
        )
        for index, address in enumerate(listen)
    ]


def _python(module: str) -> tuple[str, ...]:
    # -P: a folder "services" in the working directory must not be taken for ours.
    return (sys.executable, "-P", "-m", module)


def _plan(
    name: str, stage: str, command: tuple[str, ...], listen: tuple[str, ...], settings: ServerSettings
) -> ProcessPlan:
    if not listen:
        raise ConfigError(f"{name} has no address to listen on")
    return ProcessPlan(
        name, stage, command, listen, _health_address(name, listen[0]), settings.drain_grace_s + _STOP_MARGIN_S
    )


def _health_address(name: str, listen: str) -> str:
    address = addresses.parse(listen)
    if isinstance(address, UnixAddress):
        return str(address)
    if address.port == 0:
        raise ConfigError(
            f"{name} listens on {listen!r}; port 0 (any free one) works only for processes started one by one"
        )
    return str(TcpAddress(_ANY_HOST.get(address.host, address.host), address.port))
