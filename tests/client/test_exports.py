"""What `import omnistage` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import omnistage
from stage_runtime import errors
from stage_runtime.version import VERSION


def modules_after(statement: str) -> set[str]:
    """Modules that are loaded in a new interpreter after a statement."""
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_every_public_name_is_there() -> None:
    """Each name of __all__ can be imported, and dir() tells them."""
    values = {name: getattr(omnistage, name) for name in omnistage.__all__}

    assert values["__version__"] == VERSION
    assert set(omnistage.__all__) <= set(dir(omnistage))
    assert omnistage.__all__ == sorted(omnistage.__all__)


def test_every_error_class_can_be_imported_from_the_client() -> None:
    """All errors that a server can raise, and those of the client, are names of the package."""
    classes = {errors.OmnistageError, errors.RemoteError, *errors.all_errors().values()}

    assert {getattr(omnistage, cls.__name__) for cls in classes} == classes


def test_unknown_names_are_attribute_errors() -> None:
    """A name that the package does not have is refused as any module would."""
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        _ = omnistage.NoSuchName


def test_the_stubs_do_not_load_the_client() -> None:
    """Importing stubs loads no module of the client."""
    loaded = modules_after("import omnistage.v1.speech_pb2_grpc, omnistage.stage.v1.stage_pb2_grpc")

    ours = {name for name in loaded if name.split(".")[0] in {"omnistage", "stage_runtime", "services"}}
    assert all(name.startswith(("omnistage.v1", "omnistage.stage")) for name in ours - {"omnistage"}), ours


def test_the_client_does_not_load_models_or_decoders() -> None:
    """The client loads no torch and no service, and numpy and libsndfile not before samples are asked for."""
    loaded = modules_after("from omnistage import *\nimport omnistage.cli")

    assert {"omnistage.client", "omnistage.async_client", "omnistage.cli.say"} <= loaded
    assert not {"torch", "numpy", "soundfile", "services"} & loaded
