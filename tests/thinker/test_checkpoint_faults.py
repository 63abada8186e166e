"""Voices whose files do not fit, and checkpoints that are damaged: clear words at start or in the refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from services.thinker.voices import languages
from stage_runtime.errors import CheckpointDamaged, InvalidRequest

MakeDriver = Callable[..., Any]
Damage = Callable[[Path], object]


def edit(file: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file."""
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def save_voice(rows: object) -> Damage:
    """Damage: another content for tiny_b.pt."""
    return lambda file: torch.save(rows, file)


VOICE_DAMAGE: dict[str, tuple[Damage, str]] = {
    "missing": (Path.unlink, "voice_embedding/tiny_b.pt is missing"),
    "short": (
        save_voice(torch.zeros(8, 48)),
        "voice_embedding/tiny_b.pt has shape [8, 48]; tekken.json and params.json ask for [9, 48]",
    ),
    "narrow": (save_voice(torch.zeros(9, 47)), "has shape [9, 47]"),
    "flat": (save_voice(torch.zeros(432)), "has shape [432]"),
    "integers": (save_voice(torch.zeros(9, 48, dtype=torch.int64)), "must hold finite floating-point numbers"),
    "nan": (save_voice(torch.full((9, 48), torch.nan)), "must hold finite floating-point numbers"),
    "mapping": (save_voice({"a": torch.zeros(9, 48)}), "must hold exactly one tensor"),
    "code": (save_voice(Path), "cannot be read"),
    "empty": (lambda file: file.write_bytes(b""), "cannot be read"),
    "truncated": (lambda file: file.write_bytes(file.read_bytes()[:700]), "cannot be read"),
    "text": (lambda file: file.write_text("no voice"), "cannot be read"),
}


@pytest.mark.parametrize("damage", VOICE_DAMAGE)
def test_unusable_voice_is_left_out_and_refused_with_the_reason(
    make_driver: MakeDriver, checkpoint: Path, events: Callable[[], list[dict[str, object]]], damage: str
) -> None:
    """The stage starts with the other voice and warns; a request for the unusable one is told what is wrong with its file."""
    change, fault = VOICE_DAMAGE[damage]
    change(checkpoint / "voice_embedding" / "tiny_b.pt")

    driver = make_driver(model=checkpoint)
    with pytest.raises(InvalidRequest) as refusal:
        driver.submit("x", "tiny_b")
    driver.start(driver.submit("x", "tiny_a"))

    assert [voice.name for voice in driver.engine.describe().facts.voices] == ["tiny_a"]
    [found] = refusal.value.violations
    assert (found.field, found.reason) == ("input.voice", "VOICE_UNUSABLE")
    assert fault in found.description
    assert found.description.endswith("; usable voices: tiny_a")
    assert str(checkpoint) not in found.description
    [warning] = [event for event in events() if event["event"] == "voice_left_out"]
    assert warning["voice"] == "tiny_b"
    assert warning["level"] == "warning"


def test_voice_may_be_a_safetensors_file(make_driver: MakeDriver, checkpoint: Path) -> None:
    """A .safetensors voice file takes the place of the .pt file and speaks with the same bits."""
    plain = make_driver()
    expected = plain.speak(plain.submit("x", "tiny_b"), [])
    file = checkpoint / "voice_embedding" / "tiny_b.pt"
    rows = torch.load(file, weights_only=True)
    safetensors.torch.save_file({"embedding": rows}, file.with_suffix(".safetensors"))
    file.unlink()

    driver = make_driver(model=checkpoint)

    assert torch.equal(driver.speak(driver.submit("x", "tiny_b"), []), expected)


def test_voice_without_a_row_count_is_left_out(make_driver: MakeDriver, checkpoint: Path) -> None:
    """A voice that params.json lists and tekken.json does not know cannot be laid out in a prompt."""
    edit(checkpoint / "tekken.json", lambda tree: tree["audio"]["voice_num_audio_tokens"].pop("tiny_b"))

    with pytest.raises(InvalidRequest, match=r"tekken\.json does not say how many rows it has"):
        make_driver(model=checkpoint).submit("x", "tiny_b")


@pytest.mark.parametrize("name", ["../tiny_a", "a/b", ".", "a\\b"])
def test_voice_name_that_is_a_path_is_never_opened(make_driver: MakeDriver, checkpoint: Path, name: str) -> None:
    """Even a checkpoint cannot make the stage read outside of its folder of voices."""
    (checkpoint / "tiny_a.pt").write_bytes((checkpoint / "voice_embedding" / "tiny_a.pt").read_bytes())
    edit(checkpoint / "tekken.json", lambda tree: tree["audio"]["voice_num_audio_tokens"].update({name: 5}))

    with pytest.raises(InvalidRequest, match="its name is not fit for a file name"):
        make_driver(model=checkpoint).submit("x", name)


def test_checkpoint_without_any_usable_voice_does_not_start(make_driver: MakeDriver, checkpoint: Path) -> None:
    """A thinker that could speak for nobody says so at start."""
    for file in (checkpoint / "voice_embedding").iterdir():
        file.unlink()

    with pytest.raises(CheckpointDamaged, match=r"has no usable voice: tiny_a: voice_embedding/tiny_a\.pt is missing"):
        make_driver(model=checkpoint)


@pytest.mark.parametrize(
    ("voice", "codes"),
    [
        ("fr_male", ["fr"]),
        ("hi_female", ["hi"]),
        ("casual_male", ["en"]),
        ("cheerful_female", ["en"]),
        ("neutral_female", ["en"]),
        ("ember", []),
        ("tiny_a", []),
        ("FR_male", []),
    ],
)
def test_name_of_a_voice_tells_its_language(voice: str, codes: list[str]) -> None:
    """xx_ is a language, casual_, cheerful_ and neutral_ are English, any other name tells nothing."""
    assert languages(voice) == codes


def cut(share: float) -> Damage:
    """Damage: keep only the first part of a file."""
    return lambda file: file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])


def drop(*keys: str) -> Damage:
    """Damage: remove a key of a JSON file."""

    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        del tree[keys[-1]]

    return lambda file: edit(file, change)


def put(value: object, *keys: str) -> Damage:
    """Damage: set a key of a JSON file."""

    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return lambda file: edit(file, change)


def rename_token(old: str, new: str) -> Damage:
    """Damage: another name for a special token."""

    def change(tree: Any) -> None:
        [token] = [token for token in tree["special_tokens"] if token["token_str"] == old]
        token["token_str"] = new

    return lambda file: edit(file, change)


AUDIO = ("multimodal", "audio_model_args")

FILE_DAMAGE: list[tuple[str, str, Damage, str]] = [
    ("tekken_missing", "tekken.json", Path.unlink, "is missing"),
    ("tekken_empty", "tekken.json", cut(0), "cannot be read as a tokenizer"),
    ("tekken_half", "tekken.json", cut(0.5), "cannot be read as a tokenizer"),
    ("tekken_last_byte", "tekken.json", cut(0.99999), "cannot be read as a tokenizer"),
    ("tekken_binary", "tekken.json", lambda file: file.write_bytes(b"\xff\xfe" * 50), "cannot be read as a tokenizer"),
    ("tekken_list", "tekken.json", lambda file: file.write_text("[]"), "cannot be read as a tokenizer"),
    ("tekken_no_config", "tekken.json", drop("config"), "cannot be read as a tokenizer"),
    ("tekken_no_vocab", "tekken.json", drop("vocab"), "cannot be read as a tokenizer"),
    ("tekken_no_audio", "tekken.json", drop("audio"), "has no audio section"),
    ("tekken_no_marker", "tekken.json", rename_token("[NEXT_AUDIO_TEXT]", "<SPECIAL_36>"), "lacks one of the tokens"),
    (
        "tekken_bad_count",
        "tekken.json",
        put(0, "audio", "voice_num_audio_tokens", "tiny_a"),
        "gives voice 'tiny_a' 0 rows",
    ),
    (
        "tekken_text_count",
        "tekken.json",
        put("5", "audio", "voice_num_audio_tokens", "tiny_a"),
        "gives voice 'tiny_a' '5' rows",
    ),
    ("audio_id", "params.json", put(23, *AUDIO, "audio_token_id"), "has 24 where params.json has audio_token_id 23"),
    (
        "begin_id",
        "params.json",
        put(23, *AUDIO, "begin_audio_token_id"),
        "has 25 where params.json has begin_audio_token_id 23",
    ),
    ("params_missing", "params.json", Path.unlink, "is missing"),
    ("params_half", "params.json", cut(0.5), "cannot be read as JSON"),
    ("params_dim", "params.json", drop("dim"), "has no key 'dim'"),
    ("params_vocab", "params.json", drop("vocab_size"), "has no key 'vocab_size'"),
    ("params_audio", "params.json", drop("multimodal"), "has no key 'multimodal'"),
    ("params_other", "params.json", put("mistral", "model_type"), "model_type is 'mistral'"),
    ("params_layers", "params.json", put(3, "n_layers"), "lacks 9 tensors"),
    ("params_width", "params.json", put(97, "hidden_dim"), "params.json asks for"),
    ("weights_missing", "consolidated.safetensors", Path.unlink, "is missing"),
    ("weights_empty", "consolidated.safetensors", cut(0), "is damaged or truncated"),
    ("weights_header", "consolidated.safetensors", cut(0.001), "is damaged or truncated"),
    ("weights_half", "consolidated.safetensors", cut(0.5), "is damaged or truncated"),
    ("weights_last", "consolidated.safetensors", cut(0.99999), "is damaged or truncated"),
]


@pytest.mark.parametrize(
    ("file", "damage", "message"), [case[1:] for case in FILE_DAMAGE], ids=[case[0] for case in FILE_DAMAGE]
)
def test_damaged_checkpoint_stops_the_start(
    make_driver: MakeDriver, checkpoint: Path, file: str, damage: Damage, message: str
) -> None:
    """Every damage is found at start and told by file and fault."""
    damage(checkpoint / file)

    with pytest.raises(CheckpointDamaged) as fault:
        make_driver(model=checkpoint)

    assert message in str(fault.value)
    assert str(checkpoint) in str(fault.value)


def test_unread_tensor_is_warned_of(
    make_driver: MakeDriver, checkpoint: Path, events: Callable[[], list[dict[str, object]]]
) -> None:
    """A tensor that no stage reads does not stop the thinker, but is told."""
    weights = checkpoint / "consolidated.safetensors"
    tensors = safetensors.torch.load_file(weights)
    safetensors.torch.save_file(tensors | {"output.weight": torch.zeros(2, 2)}, weights)

    make_driver(model=checkpoint)

    [warning] = [event for event in events() if event["event"] == "thinker_tensors_skipped"]
    assert (warning["count"], warning["first"]) == (1, "output.weight")
