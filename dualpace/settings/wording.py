"""Mistakes in overrides, which Hydra and OmegaConf report at length, as one sentence each: what was
asked, what is wrong with it, what to write instead."""

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import MarkedYAMLError

from dualpace.settings.help import APPENDED
from dualpace.settings.meaning import meanings
from dualpace.settings.schema import ROOTS, VARIANTS, BenchConfig, ServeConfig

_VLLM = {  # what users of vLLM write
    "max_model_len": "model.max_context",
    "max_num_batched_tokens": "gpu.max_batched_tokens",
    "max_num_seqs": "gpu.max_batch_size",
    "served_model_name": "model.name",
    "tensor_parallel_size": "gpu.tp",
}


def _remedy(word: str) -> str:
    """How to write a word of the command line that Hydra's grammar cannot read."""
    key, _, value = word.partition("=")
    if value.startswith("~"):
        return "write $HOME in place of ~"
    if not value or value[0] in "[{'\"":
        return (
            "write key=value, and put a value that holds any of = , [ ] { } in quotes of its own, "
            "as in 'key=\"a=b\"'"
        )
    text = value.replace("\\", "\\\\").replace('"', '\\"')
    quoted = shlex.quote(f'{key}="{text}"')
    return f"put the value in quotes of its own, as in {quoted}"


def sentence(error: Exception) -> str:
    """What `error`, raised while settings were composed, says to the person who wrote them."""
    if isinstance(error, MarkedYAMLError):
        return _bad_yaml(error)
    own = isinstance(error, OmegaConfBaseException)
    cause = error if own else error.__cause__ or error.__context__
    match error, cause:
        case MissingConfigException(), _:
            return _unknown_choice(error)
        case OverrideParseException(), _:
            return f"{error.override} cannot be read: {_remedy(str(error.override))}."
        case _, ConfigAttributeError() | ConfigKeyError():
            return _in_file(error, cause) or _unknown_key(cause)
        case _, ValidationError():
            return _wrong_type(error, cause)
        case _, MissingMandatoryValue():
            return _missing(cause)
        case _, InterpolationResolutionError():
            problem = str(cause).splitlines()[0].rpartition("interpolation: ")[2]
            return f"{cause.full_key} refers to what is not there: {problem}."
    first = str(error).splitlines()[0]
    if found := re.search(r"Could not override '([^']*)'", first):
        group = found.group(1)
        if not group:
            return "A word begins with =: write key=value."
        if group in APPENDED:
            return f"{group} is chosen with a plus in front: +{group}=NAME."
        return f"{group} is no group of this command: --help lists those that are."
    if "group override must be a string" in first:
        return "A group is set to one of its choices, group=choice, and a setting by its full name."
    if found := re.search(r"Could not append to config. An item is already at '(.*)'", first):
        return f"{found.group(1)} is set without a plus in front: {found.group(1)}=VALUE."
    if found := re.search(r"Multiple values for ([\w/]+)\.", first):
        return f"{found.group(1)} is chosen more than once: keep one of its choices."
    if found := re.search(r"Ambiguous value for argument '(.*)'", first):
        return (
            f"{found.group(1)} has several values: for a list write [a,b], for a sweep add "
            f"--multirun."
        )
    return f"{first.rstrip('.')}."


def _bad_yaml(error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{mark.name}, line {mark.line + 1}" if mark else "A file of settings"
    what = " ".join(str(error.problem).split())
    return f"{where}, is not valid YAML: {what}{', ' * bool(error.context)}{error.context or ''}."


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").partition("/")
    options = [option for option in error.options or () if not option.endswith("_schema")]
    if not options and not name:
        return f"{group}.yaml is not there: leave --config-name and --config-path out."
    if not options:
        return f"{error.missing_cfg_file} is not there: --help lists the groups and their choices."
    files = ", or name a folder or file with model.source=/path" if group == "model" else ""
    return f"{group}={name} is unknown: choose one of {', '.join(options)}{files}."


def unknown_option(root: str, option: str, words: Sequence[str]) -> str:
    """What to write instead of `option`, a word of the command line `words` that the command
    conf/ROOT.yaml does not have, or not there."""
    if option[0:1] != "-":
        return f"{option} follows an option that follows a setting: write options before settings."
    flag, _, value = option.partition("=")
    after = words[words.index(option) + 1 :] if option in words else ()
    if not value:
        value = after[0] if after and not after[0].startswith("-") else "VALUE"
    name = flag.lstrip("-").replace("-", "_")
    schema = ROOTS.get(f"{root}_schema", ServeConfig)
    if name in APPENDED:
        return f"{flag} is no option: write +{name}={value}."
    if name != "model" and name in {group for group, _ in VARIANTS} & set(meanings(schema)):
        return f"{flag} is no option: write {name}={value}."
    name = "source" if name == "model" else name
    keys = list(_all_keys(schema))
    lasts = {key.rpartition(".")[2] for key in keys}
    near = [name] if name in lasts else difflib.get_close_matches(name, lasts, 1, 0.7)
    found = [name] if name in keys else [k for k in keys if k.rpartition(".")[2] in near][:3]
    if _VLLM.get(name) in keys:
        found = [_VLLM[name]]
    if not found:
        return f"{flag} is no option: settings are written key=value, and --help lists them."
    return f"{flag} is no option: write {' or '.join(f'{key}={value}' for key in found)}."


def _missing(error: OmegaConfBaseException) -> str:
    known = meanings(error.object_type) if error.object_type in _schemas(error) else {}
    text = known[str(error.key)].text if str(error.key) in known else ""
    value = "FILE" if error.key == "path" else "VALUE"
    if text.startswith("of "):
        text = f"the {error.key} {text}"
    return f"{error.full_key}={value} is needed{', ' * bool(text)}{text}."


def _file_of(error: Exception) -> str | None:
    """The file below a folder of settings that `error` is about, if it is about one."""
    found = re.match(r"In '([^']+)': ", str(error))
    return f"{found.group(1)}.yaml" if found else None


def _in_file(error: Exception, cause: OmegaConfBaseException) -> str | None:
    """An unknown key in a file of the user's own."""
    file = _file_of(error)
    if file is None:
        return None
    package, _, key = str(cause.full_key).partition(".")
    if package == file.partition("/")[0] and key.partition(".")[0] in meanings(BenchConfig):
        return (
            f"{file} sets {key} inside of {package}: begin the file "
            f"with the line '# @package _global_'."
        )
    for (group, schema), made in VARIANTS.items():
        if group == package and key in meanings(made):
            return (
                f"{file} sets {key} of a schema that it does not name: begin the file with the "
                f"line 'defaults: [{schema}, _self_]'."
            )
    return f"In {file}, {_unknown_key(cause)}"


def _unknown_key(error: OmegaConfBaseException) -> str:
    known = list(meanings(error.object_type)) if error.object_type in _schemas(error) else []
    parent = str(error.full_key).rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    near = [prefix + name for name in difflib.get_close_matches(str(error.key), known, 1)]
    if error.key in _VLLM:
        near = [_VLLM[str(error.key)]]
    if not near:  # perhaps the group was forgotten, or another one meant
        near = [full for full in _all_keys(ServeConfig) if full.endswith(f".{error.key}")]
    hint = f"did you mean {near[0]}?" if near else "--help lists all."
    return f"{error.full_key} is no setting: {hint}"


def _all_keys(schema: type, prefix: str = "") -> Iterator[str]:
    for name, meaning in meanings(schema).items():
        if is_dataclass(meaning.default):
            yield from _all_keys(type(meaning.default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _wrong_type(error: Exception, cause: OmegaConfBaseException) -> str:
    written = str(error).removeprefix("Error merging override ").splitlines()[0]
    if file := _file_of(error):
        if not cause.full_key:  # found by merging it as a whole
            value = str(error).rpartition("value: ")[2].splitlines()[0]
            return f"{file} has {value} in place of settings, which are written key: value."
        written = f"{cause.full_key} in {file}"
    known = meanings(cause.object_type) if cause.object_type in _schemas(cause) else {}
    if str(cause.key) in known:
        kind = known[str(cause.key)].type
        hint = f", written {cause.full_key}=[a,b]" if kind.startswith("list") else ""
        return f"{written} does not fit: {cause.full_key} takes {kind}{hint}."
    return f"{written} does not fit: {str(cause.msg).splitlines()[0]}."


def _schemas(error: OmegaConfBaseException) -> list[type]:
    """The type whose field it is about, if that is one of ours."""
    kind = error.object_type
    return [kind] if isinstance(kind, type) and kind.__module__.startswith("dualpace.") else []
