"""The training functions with the fields of their configuration as keywords."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from knnlm.training.adapt import adapt
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.metric_learning import KeyMetricConfig, train_key_map, train_key_metric
from knnlm.training.output_matrix import OutputConfig, train_output
from knnlm.training.teacher import TeacherConfig, make_targets


def _call(function: Any, config: Any, *args: Any, **options: Any) -> Any:
    names = {field.name for field in fields(config)}
    own = {name: options.pop(name) for name in list(options) if name in names}
    return function(*args, config=config(**own), **options)


def fit_output(*args: Any, **options: Any) -> Any:
    return _call(train_output, OutputConfig, *args, **options)


def fit_key_map(*args: Any, **options: Any) -> Any:
    return _call(train_key_map, KeyMetricConfig, *args, **options)


def fit_key_metric(*args: Any, **options: Any) -> Any:
    return _call(train_key_metric, KeyMetricConfig, *args, **options)


def fit_decoder(*args: Any, **options: Any) -> Any:
    return _call(train_decoder, DecoderConfig, *args, **options)


def retrieve_targets(*args: Any, **options: Any) -> Any:
    return _call(make_targets, TeacherConfig, *args, **options)


def fit_adaptation(*args: Any, **options: Any) -> Any:
    """`adapt` shares the name `held_out` with the decoder's configuration; here it is the former."""
    held_out = options.pop("held_out", None)
    return _call(lambda *a, **o: adapt(*a, held_out=held_out, **o), DecoderConfig, *args, **options)
