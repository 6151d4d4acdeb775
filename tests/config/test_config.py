"""ElasticConfig as a value: what a file may say, key by key, and what can be done with what it said."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import KEYS, SECTIONS, key_table, section_of
from elastic_ext.errors import ConfigError, ElasticError
from tests.support.configs import LARGEST, VALUES, configs, dotted_values, unhurried
from tests.support.thinning import each_once

few_examples = settings(unhurried, max_examples=40)  # a whole config takes a while to be made up
DESIGN_EXAMPLE = b"""{"version": 1,
 "dataloader": {"batch_size": 4, "num_workers": 2, "pin_memory": false},
 "optimizer": {"learning_rate": 0.001}}"""

NOT_INTEGERS = ["true", "false", '"1"', "1.5", "1.0", "1e3", "[]", "[1]", "{}", "9007199254740992", "-1"]
NOT_NUMBERS = ["true", "false", '"0.1"', "[]", "{}", "[0.1]", "-1e-300", "-1"]
NOT_BOOLEANS = ["0", "1", "1.0", '"true"', '""', "[]", "{}", "[true]"]
NOT_WORDS = ['""', '"FULL_SHARD"', '" off"', "0", "true", '["off"]', "{}"]

# Per key: JSON that it takes, from the lowest to the highest; and JSON that it refuses, from just outside.
TABLE: Mapping[str, tuple[list[str], list[str]]] = {
    "version": (["1", "2", str(LARGEST)], ["0", *NOT_INTEGERS]),
    "reason": (['""', '"why"', json.dumps("x" * 2000)], [json.dumps("x" * 2001), "1", "true", "[]", "{}"]),
    "apply_at_step": (["0", "1", str(LARGEST)], NOT_INTEGERS),
    "global_batch_size": (["1", "512", str(LARGEST)], ["0", *NOT_INTEGERS]),
    "dataloader.batch_size": (["1", "4", str(LARGEST)], ["0", *NOT_INTEGERS]),
    "dataloader.num_workers": (["0", "1", "1024"], ["1025", *NOT_INTEGERS]),
    "dataloader.prefetch_factor": (["1", "2", "1024"], ["0", "1025", *NOT_INTEGERS]),
    "dataloader.pin_memory": (["false", "true"], NOT_BOOLEANS),
    "optimizer.learning_rate": (["5e-324", "0.001", "1", "1e308"], ["0", "0.0", "-0.0", "1e-400", *NOT_NUMBERS]),
    "optimizer.weight_decay": (["0", "0.0", "0.1", "1e308"], NOT_NUMBERS),
    "parallelism.strategy": (['"no_shard"', '"shard_grad_op"', '"full_shard"', '"hybrid_shard"'], NOT_WORDS),
    "parallelism.shard_degree": (["1", "8", str(LARGEST)], ["0", *NOT_INTEGERS]),
    "parallelism.unit": (["1", "12", '"whole"', str(LARGEST)], ["0", '"Whole"', '""', *NOT_INTEGERS]),
    "parallelism.activation_checkpoint": (["0", "0.5", "1", "1.0"], ["1.0000000000000002", "2", *NOT_NUMBERS]),
    "parallelism.prefetch": (["0", "1", str(LARGEST), '"torch"'], NOT_INTEGERS),
    "communication.bucket_cap_mb": (
        ["5e-324", "25", "0.5", "1048576", '"torch"'],
        ["0", "-0.0", "1048577", "1e308", *NOT_NUMBERS],
    ),
    "checkpoint.steps": (["1", "1000", str(LARGEST)], ["0", *NOT_INTEGERS]),
    "checkpoint.epochs": (["1", "10", str(LARGEST)], ["0", *NOT_INTEGERS]),
    "checkpoint.now": (["true", "false"], NOT_BOOLEANS),
    "tuning.mode": (['"off"', '"advise"', '"auto"'], ['"on"', *NOT_WORDS]),
    "tuning.knobs": (
        ["{}", '{"dataloader.batch_size": [1, 64]}', '{"parallelism.unit": ["whole", 1]}'],
        ["[]", "true", "1", '""', '{"a": [1]}', '{"dataloader.batch_size": 4}', '{"dataloader.batch_size": [0, 4]}'],
    ),
    "tuning.headroom": (["0", "0.25", "0.5"], ["0.5000000000000001", "1", *NOT_NUMBERS]),
    "tuning.memory_bytes": (["1", "50", str(LARGEST)], ["0", *NOT_INTEGERS]),
    "tuning.probe_budget": (["0", "0.25", "1"], ["1.0000000000000002", "-0.1", *NOT_NUMBERS]),
    "tuning.goal": (["1e-9", "50", "1e300"], ["0", "-1", *NOT_NUMBERS]),
    "tuning.probe_steps": (["1", "50", str(LARGEST)], ["0", *NOT_INTEGERS]),
}
TAKEN = [(path, text) for path, (taken, _) in TABLE.items() for text in taken]
NOT_TAKEN = [(path, text) for path, (_, refused) in TABLE.items() for text in [*refused, "null"]]


def document(path: str, text: str) -> bytes:
    """A file that holds one key, with the value as JSON text."""
    name, dot, rest = path.partition(".")
    version = "" if path == "version" else '"version": 1, '
    value = f'{{"{rest}": {text}}}' if dot else text
    return f'{{{version}"{name}": {value}}}'.encode()


def refused(data: bytes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ElasticConfig.parse(data)
    return caught.value


# ---- the table ----


def test_this_table_has_a_row_for_every_key() -> None:
    assert set(TABLE) == set(KEYS)
    assert set(VALUES) == {path for path in KEYS if path not in ("version", "reason", "apply_at_step")}


@pytest.mark.parametrize(("path", "text"), TAKEN)
def test_every_key_takes_the_values_of_its_range(path: str, text: str) -> None:
    config = ElasticConfig.parse(document(path, text))
    kept = getattr(config, path) if path in ("version", "reason", "apply_at_step") else config.get(path)
    given_value = json.loads(text)
    if path == "tuning.knobs":
        given_value = {name: tuple(bounds) for name, bounds in given_value.items()}
    assert kept == given_value
    assert isinstance(kept, bool) == isinstance(given_value, bool)


@pytest.mark.parametrize(("path", "text"), NOT_TAKEN)
def test_every_key_refuses_what_is_outside_and_says_key_value_and_range(path: str, text: str) -> None:
    error = refused(document(path, text))
    assert isinstance(error, ValueError) and isinstance(error, ElasticError)
    (refusal,) = error.refusals
    assert refusal.key == path
    shown_whole = json.dumps(json.loads(text))
    assert refusal.given == (shown_whole if len(shown_whole) <= 80 else shown_whole[:77] + "...")
    assert refusal.allowed
    for part in (path, refusal.given, refusal.allowed):
        assert part in str(error)


@pytest.mark.parametrize("path", TABLE)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "1" + "0" * 5000])
def test_no_key_takes_what_is_not_a_finite_number(path: str, number: str) -> None:
    refused(document(path, number))
    refused(document(path, f"[{number}]"))


@pytest.mark.parametrize("path", TABLE)
def test_a_key_that_stands_twice_is_refused_wherever_it_stands(path: str) -> None:
    taken = TABLE[path][0][0]
    name, _, rest = path.rpartition(".")
    inner = f'"{rest}": {taken}, "{rest}": {taken}'
    data = f'{{"version": 1, "{name}": {{{inner}}}}}' if name else f'{{"version": 1, {inner}}}'
    assert "twice" in str(refused(data.encode()))


@pytest.mark.parametrize(
    "section", ["dataloader", "optimizer", "parallelism", "communication", "checkpoint", "tuning", "user"]
)
@pytest.mark.parametrize("text", ["null", "[]", "1", "true", '"x"', "[[]]"])
def test_a_section_that_is_no_object_is_refused(section: str, text: str) -> None:
    (refusal,) = refused(f'{{"version": 1, "{section}": {text}}}'.encode()).refusals
    assert (refusal.key, refusal.allowed) == (section, "an object")


@pytest.mark.parametrize(
    ("document_text", "key", "nearest"),
    [
        ('"learning_rate": 0.1', "learning_rate", "optimizer.learning_rate"),
        ('"lr": 0.1', "lr", "optimizer.learning_rate"),
        ('"optimizer": {"lr": 0.1}', "optimizer.lr", "optimizer.learning_rate"),
        ('"dataloader": {"batchsize": 4}', "dataloader.batchsize", "dataloader.batch_size"),
        ('"data_loader": {"batch_size": 4}', "data_loader", "dataloader"),
        ('"optimizer.learning_rate": 0.1', "optimizer.learning_rate", "optimizer.learning_rate"),
        ('"checkpoint": {"step": 4}', "checkpoint.step", "checkpoint.steps"),
        ('"parallelism": {"version": 1}', "parallelism.version", ""),
        ('"revision": 1', "revision", ""),
        ('"mixup": 0.2', "mixup", ""),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_known_one_named(document_text: str, key: str, nearest: str) -> None:
    (refusal,) = refused(f'{{"version": 1, {document_text}}}'.encode()).refusals
    assert refusal.key == key
    assert f'the nearest is "{nearest}' in refusal.advice
    assert '"user"' in refusal.advice


def test_an_unknown_key_made_to_steer_a_terminal_is_shown_harmless() -> None:
    error = refused(json.dumps({"version": 1, "\x1b[2J\n\u202e": 1, "user": {"\x1b]0;x\x07\n": {}}}).encode())
    assert len(error.refusals) == 2
    assert str(error).isprintable()


def test_every_refusal_of_a_file_is_reported_at_once() -> None:
    data = b"""{"version": 0, "global_batch_size": -3, "dataloader": {"batch_size": true, "num_workers": 2000,
               "workers": 1}, "optimizer": {"learning_rate": null}, "checkpoint": {"steps": 1, "epochs": 1}, "typo": 1,
               "tuning": {"headroom": 0.9}, "user": {"x": {"y": 1}, "": 1}, "apply_at_step": null}"""
    error = refused(data)
    assert sorted(refusal.key for refusal in error.refusals) == [
        "apply_at_step",
        "checkpoint",
        "dataloader.batch_size",
        "dataloader.num_workers",
        "dataloader.workers",
        "global_batch_size",
        "optimizer.learning_rate",
        "tuning.headroom",
        "typo",
        "user",
        "user.x",
        "version",
    ]
    assert all(str(refusal) in str(error) for refusal in error.refusals)


@pytest.mark.parametrize(
    ("section", "pattern"), each_once(["", "dataloader", "user", "tuning"], ['"k%d":0', '"u%d":[]'])
)
def test_a_file_of_fifty_thousand_faults_is_refused_quickly_and_in_few_words(pattern: str, section: str) -> None:
    inner = ",".join(pattern % number for number in range(50_000))
    if section == "user":
        inner = inner.replace(":0", ':{"a":0}').replace(":[]", ":{}")
    data = f'{{"version":1,"{section}":{{{inner}}}}}' if section else f'{{"version":1,{inner}}}'
    assert 500_000 < len(data) <= 1 << 20
    error = refused(data.encode())
    assert len(error.refusals) <= 51
    assert len(str(error)) < 20_000


def test_a_file_without_a_version_is_told_where_to_put_one() -> None:
    (refusal,) = refused(b'{"dataloader": {"version": 3, "batch_size": 4}}').refusals
    assert (refusal.key, refusal.given) == ("version", "absent")
    assert '"version": 1' in refusal.advice


def test_the_example_of_the_design_is_valid_as_it_stands() -> None:
    config = ElasticConfig.parse(DESIGN_EXAMPLE)
    assert config.version == 1
    assert config.values() == {
        "dataloader.batch_size": 4,
        "dataloader.num_workers": 2,
        "dataloader.pin_memory": False,
        "optimizer.learning_rate": 0.001,
    }


def test_the_versions_that_dlrover_writes_into_sections_are_accepted_and_say_nothing() -> None:
    written = b'{"version": 3, "dataloader": {"version": 0, "batch_size": 4}, "optimizer": {"version": 7}}'
    plain = b'{"version": 3, "dataloader": {"batch_size": 4}}'
    assert ElasticConfig.parse(written) == ElasticConfig.parse(plain)
    assert ElasticConfig.parse(written).digest == ElasticConfig.parse(plain).digest


@pytest.mark.parametrize("text", ["null", "true", "-1", "1.5", '"1"', "[]"])
def test_a_version_of_a_section_that_dlrover_would_not_write_is_refused(text: str) -> None:
    (refusal,) = refused(f'{{"version": 1, "dataloader": {{"version": {text}}}}}'.encode()).refusals
    assert refusal.key == "dataloader.version"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('"checkpoint": {"steps": 5, "epochs": 1}', "checkpoint"),
        ('"parallelism": {"strategy": "no_shard", "shard_degree": 2}', "parallelism.shard_degree"),
    ],
)
def test_pairs_that_contradict_each_other_are_refused(text: str, key: str) -> None:
    (refusal,) = refused(f'{{"version": 1, {text}}}'.encode()).refusals
    assert refusal.key == key and refusal.advice


def test_no_shard_over_one_rank_is_no_contradiction() -> None:
    ElasticConfig.parse(b'{"version": 1, "parallelism": {"strategy": "no_shard", "shard_degree": 1}}')


@pytest.mark.parametrize("name", ["x" * 201, ""])
def test_names_of_the_users_own_have_1_to_200_characters(name: str) -> None:
    (refusal,) = refused(json.dumps({"version": 1, "user": {name: 1}}).encode()).refusals
    assert refusal.key == "user" and "1 to 200" in refusal.allowed


@pytest.mark.parametrize("name", ["x" * 200, "a.b.c", "user.x", ".", "version", "\N{GRINNING FACE}", "\n", " "])
def test_names_of_the_users_own_may_be_any_text(name: str) -> None:
    config = ElasticConfig.parse(json.dumps({"version": 1, "user": {name: [1, [None, "x"]]}}).encode())
    assert config.get(f"user.{name}") == (1, (None, "x"))
    assert ElasticConfig.parse(config.to_json().encode()) == config
    assert ElasticConfig.from_values(config.values(), version=1) == config


def test_the_users_values_cannot_be_changed_in_place_through_what_was_given() -> None:
    given_list = [1, 2]
    raw: dict[str, object] = {"x": given_list}
    config = ElasticConfig(version=1, user=raw)  # type: ignore[arg-type]
    given_list.append(3)
    raw["y"] = 1
    assert config.values() == {"user.x": (1, 2)}


# ---- made in Python ----


@pytest.mark.parametrize("path", ["version", "reason", "apply_at_step"])
def test_values_by_dotted_key_leave_what_belongs_to_the_version_alone(path: str) -> None:
    with pytest.raises(ConfigError, match=f"{path} is 1"):
        ElasticConfig.from_values({path: 1})


@pytest.mark.parametrize("path", ["user", "dataloader", "", ".", "optimizer.", ".x", "user2.x", "optimizer.lr"])
def test_values_by_dotted_key_refuse_keys_that_are_none(path: str) -> None:
    with pytest.raises(ConfigError, match="not a known key"):
        ElasticConfig.from_values({path: 1})


def test_values_by_dotted_key_report_every_refusal() -> None:
    with pytest.raises(ConfigError) as caught:
        ElasticConfig.from_values({"typo": 1, "optimizer.learning_rate": 0, "user.x": {}, "global_batch_size": None})
    keys = sorted(refusal.key for refusal in caught.value.refusals)
    assert keys == ["global_batch_size", "optimizer.learning_rate", "typo", "user.x"]


@pytest.mark.parametrize("value", ["\ud800", ["\udfff"], float("nan"), 2**53])
def test_what_could_not_be_written_to_a_file_is_refused_in_python_too(value: object) -> None:
    with pytest.raises(ConfigError):
        ElasticConfig.from_values({"user.x": value})
    with pytest.raises(ConfigError):
        ElasticConfig(version=1, user={"x": value})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "fields", [{"version": -1}, {"version": True}, {"version": 1, "revision": -1}, {"version": 1.0}]
)
def test_versions_and_revisions_are_counts(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ElasticConfig(**fields)  # type: ignore[arg-type]


def test_only_a_script_starts_with_version_0() -> None:
    assert ElasticConfig.from_values({}).version == 0
    assert ElasticConfig.from_dict({"version": 0}).version == 0
    refused(b'{"version": 0}')


def test_a_config_is_frozen() -> None:
    config = ElasticConfig.parse(DESIGN_EXAMPLE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.version = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dataloader.batch_size = 8  # type: ignore[misc]


@few_examples
@given(configs())
def test_a_config_survives_pickle_and_copy(config: ElasticConfig) -> None:
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), copy.copy(config)):
        assert twin == config and twin.digest == config.digest


def test_a_refusal_survives_pickle() -> None:
    error = refused(b'{"version": 0, "typo": 1}')
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error) and twin.refusals == error.refusals


@pytest.mark.parametrize(
    ("version", "revision", "label"), [(0, 0, "version 0"), (7, 0, "version 7"), (7, 2, "version 7, revision 2")]
)
def test_the_label_names_version_and_revision(version: int, revision: int, label: str) -> None:
    assert ElasticConfig(version=version, revision=revision).label == label


@pytest.mark.parametrize(
    "path", ["nosuch", "nosuch.key", "optimizer.nosuch", "optimizer", "reason.key", "", ".", "user"]
)
def test_a_key_that_the_table_lacks_has_no_value(path: str) -> None:
    assert ElasticConfig(version=1, reason="a test").get(path) is None


# ---- there and back ----


@few_examples
@given(configs())
def test_a_config_reads_back_as_it_was_written(config: ElasticConfig) -> None:
    twin = ElasticConfig.parse(config.to_json().encode())
    assert twin == config
    assert twin.digest == config.digest
    assert twin.to_json() == config.to_json()
    assert twin.differences(config) == {}


@few_examples
@given(configs(), st.integers(0, 99))
def test_a_config_comes_back_from_plain_values_with_its_revision(config: ElasticConfig, revision: int) -> None:
    revised = dataclasses.replace(config, revision=revision)
    plain = json.loads(json.dumps(revised.to_dict()))
    assert ElasticConfig.from_dict(plain, revision=revision) == revised


@few_examples
@given(configs(), st.randoms())
def test_the_digest_does_not_depend_on_how_a_file_is_written(config: ElasticConfig, random: object) -> None:
    def shuffled(value: object) -> object:
        if not isinstance(value, dict):
            return value
        names = list(value)
        random.shuffle(names)  # type: ignore[attr-defined]
        return {name: shuffled(value[name]) for name in names}

    text = json.dumps(shuffled(config.to_dict()), indent=7)
    assert ElasticConfig.parse(text.encode()).digest == config.digest


@few_examples
@given(configs(), configs())
def test_unlike_contents_have_unlike_digests(one: ElasticConfig, other: ElasticConfig) -> None:
    same = json.dumps(one.to_dict(), sort_keys=True) == json.dumps(other.to_dict(), sort_keys=True)
    assert (one.digest == other.digest) == same


def test_the_digest_tells_revisions_apart() -> None:
    config = ElasticConfig(version=3)
    assert config.digest != dataclasses.replace(config, revision=1).digest


# ---- over the start-up values ----

EMPTY = ElasticConfig(version=0)


def laid_over(config: ElasticConfig, base: ElasticConfig) -> ElasticConfig:
    """``config.over(base)``, for pairs that can be in force together."""
    try:
        return config.over(base)
    except ConfigError:
        assume(False)
        raise


@few_examples
@given(configs())
def test_over_nothing_a_config_is_what_it_is(config: ElasticConfig) -> None:
    assert config.over(EMPTY) == config


@few_examples
@given(configs(), configs())
def test_what_a_config_says_wins_and_what_it_leaves_out_means_the_start_up_value(
    config: ElasticConfig, base: ElasticConfig
) -> None:
    merged = laid_over(config, base)
    mine, started, values = config.values(), base.values(), merged.values()
    replaced = {other for path in mine if path in KEYS for other in KEYS[path].replaces} | {"checkpoint.now"}
    assert (merged.version, merged.reason, merged.apply_at_step) == (
        config.version,
        config.reason,
        config.apply_at_step,
    )
    assert values == {**{path: value for path, value in started.items() if path not in replaced}, **mine}
    assert merged.over(base) == merged


@pytest.mark.parametrize(
    ("base", "mine", "merged"),
    [
        ({"checkpoint.steps": 5}, {"checkpoint.epochs": 1}, {"checkpoint.epochs": 1}),
        ({"checkpoint.epochs": 1}, {"checkpoint.steps": 5}, {"checkpoint.steps": 5}),
        ({"checkpoint.now": True, "checkpoint.steps": 5}, {}, {"checkpoint.steps": 5}),
        ({"checkpoint.now": True}, {"checkpoint.steps": 5}, {"checkpoint.steps": 5}),
        ({}, {"checkpoint.now": True}, {"checkpoint.now": True}),
        (
            {"parallelism.strategy": "full_shard", "parallelism.shard_degree": 8},
            {"parallelism.strategy": "no_shard"},
            {"parallelism.strategy": "no_shard"},
        ),
        (
            {"parallelism.strategy": "full_shard", "parallelism.shard_degree": 8},
            {"parallelism.shard_degree": 4},
            {"parallelism.strategy": "full_shard", "parallelism.shard_degree": 4},
        ),
        ({"user.x": 1, "user.y": 2}, {"user.x": None}, {"user.x": None, "user.y": 2}),
        (
            {"optimizer.learning_rate": 1},
            {"optimizer.weight_decay": 0},
            {"optimizer.learning_rate": 1.0, "optimizer.weight_decay": 0.0},
        ),
    ],
)
def test_keys_that_exclude_each_other_replace_each_other(
    base: dict[str, object], mine: dict[str, object], merged: dict[str, object]
) -> None:
    config = ElasticConfig.from_values(mine, version=2).over(ElasticConfig.from_values(base))
    assert config.values() == merged
    assert config.version == 2


def test_what_contradicts_a_start_up_value_is_refused_over_it() -> None:
    base = ElasticConfig.from_values({"parallelism.strategy": "no_shard"})
    with pytest.raises(ConfigError, match="shard_degree is 2"):
        ElasticConfig.from_values({"parallelism.shard_degree": 2}, version=2).over(base)


# ---- revisions ----


@few_examples
@given(configs(), dotted_values(), st.integers(0, 9))
def test_a_revision_changes_what_it_names_and_counts_up(
    config: ElasticConfig, changes: dict[str, object], revision: int
) -> None:
    before = dataclasses.replace(config, revision=revision)
    try:
        after = before.revise(changes, "because")
    except ConfigError:
        assume(False)
    assert (after.version, after.revision, after.reason) == (config.version, revision + 1, "because")
    assert after.apply_at_step is None
    replaced = {other for path in changes if path in KEYS for other in KEYS[path].replaces}
    may_differ = {*changes, *replaced, "checkpoint.now"}
    assert set(before.differences(after)) <= may_differ
    assert all(after.get(path) == value for path, value in ElasticConfig.from_values(changes).values().items())
    assert (before.version, before.revision) == (config.version, revision)


def test_a_save_asked_for_once_is_not_asked_for_again_by_a_revision() -> None:
    config = ElasticConfig.from_values({"checkpoint.now": True, "checkpoint.steps": 5}, version=7)
    assert config.revise({"dataloader.batch_size": 2}, "memory").checkpoint.now is None


@pytest.mark.parametrize("changes", [{"typo": 1}, {"version": 2}, {"optimizer.learning_rate": -1}, {"reason": "x"}])
def test_a_revision_is_checked_like_a_file(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ElasticConfig(version=1).revise(changes, "because")


# ---- differences ----


@few_examples
@given(configs(), configs())
def test_differences_lead_from_the_older_values_to_the_newer(one: ElasticConfig, other: ElasticConfig) -> None:
    changed = one.differences(other)
    values = {**one.values(), **{path: after for path, (_, after) in changed.items()}}
    assert {path: value for path, value in values.items() if value is not None} == {
        path: value for path, value in other.values().items() if value is not None
    }
    assert other.differences(one) == {path: (after, before) for path, (before, after) in changed.items()}
    assert one.differences(one) == {}


@pytest.mark.parametrize(
    ("old", "new"), [(True, 1), (0, False), ((1,), (True,)), (1, 1.0), ("1", 1), ((), ""), (None, 0)]
)
def test_values_that_python_calls_equal_and_json_does_not_are_different(old: object, new: object) -> None:
    one, other = (ElasticConfig.from_values({"user.x": value}, version=1) for value in (old, new))
    assert one.differences(other) == {"user.x": (old, new)}


# ---- sections and the printed table ----


def test_every_key_that_training_follows_belongs_to_a_section_with_an_order() -> None:
    assert {section_of(path) for path in KEYS} - {"version", "reason", "apply_at_step"} == set(SECTIONS) - {"user"}


def test_the_printed_table_has_a_line_for_every_key_with_its_range() -> None:
    lines = key_table().splitlines()
    for path, key in KEYS.items():
        assert f"| `{path}` | {key.rule.allowed} | {key.meaning} |" in lines
    assert len(lines) == len(KEYS) + 3
