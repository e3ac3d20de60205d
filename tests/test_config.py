import copy
import dataclasses
import pickle

import pytest

from ple_compile import Config
from ple_compile.config import make_config
from ple_compile.pipeline import PASS_NAMES


def test_one_switch_per_pass_and_a_line_about_each_field() -> None:
    names = {item.name for item in dataclasses.fields(Config)}
    assert set(PASS_NAMES) <= names
    for name in names:
        assert f"    {name}: " in Config.__doc__


def test_no_pass_name_contains_another() -> None:
    # TORCHINDUCTOR_DISABLED_PASSES matches by substring.
    for name in PASS_NAMES:
        assert not [other for other in PASS_NAMES if other != name and name in other]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"fuse_gates": True}, "unknown option 'fuse_gates'; did you mean 'fuse_gate'?"),
        ({"zzz": 1}, "unknown option 'zzz'; the options are "),
        (
            {"max_autotune": True},
            r"'max_autotune' is an option of Inductor; write options=\{'inductor': \{'max_autotune'",
        ),
        ({"fuse_gate": 1}, "Config.fuse_gate is 1, a int; give it a bool"),
        ({"mode": "fast"}, "Config.mode is 'fast'; it is one of default"),
        ({"inductor": {"max_autotun": True}}, "did you mean 'max_autotune'"),
        ({"inductor": {3: True}}, "Config.inductor has the key 3"),
        (
            {"inductor": {"max_autotune": "yes"}},
            "Config.inductor has 'max_autotune' as 'yes', a str; give it a bool",
        ),
        ({"inductor": {"max-autotune": 1}}, "Config.inductor has 'max-autotune' as 1, a int; give it a bool"),
        ({"inductor": True}, "Config.inductor is True, a bool; give it a dict"),
    ],
)
def test_mistakes_name_field_value_and_remedy(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(options)
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_a_configuration_is_copied_as_any_dataclass() -> None:
    config = Config(fuse_gate=False, inductor={"max_autotune": True})
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == dataclasses.replace(config) == config
    with pytest.raises(ValueError, match="did you mean 'fuse_gate'"):
        dataclasses.replace(config, fuse_gates=True)


def test_mode_becomes_inductors_options() -> None:
    assert Config().inductor_patches() == {}
    assert Config(mode="reduce-overhead").inductor_patches() == {"triton.cudagraphs": True}
    patches = Config(mode="max-autotune", inductor={"max_autotune": False}).inductor_patches()
    assert patches["triton.cudagraphs"] and not patches["max_autotune"]
    assert make_config({}, mode="reduce-overhead").mode == "reduce-overhead"
