"""The comparison of precisions: tables and ranges from the rounds, and a real measurement. No test reads a clock."""

import precision
import pytest
from gluon_mgpu.trainer.precision import can_compute_bf16
from precision import Learned, Round

ROUNDS = [
    Round("mlp", "1 x cpu", "bf16", 100.0, 150.0),
    Round("mlp", "1 x cpu", "bf16", 50.0, 100.0),
    Round("mlp", "1 x cpu", "bf16", 120.0, 60.0),
    Round("mlp", "2 x cpu", "bf16", 10.0, 30.0),
]


def test_ratios_are_those_of_the_rounds_and_not_of_the_medians():
    assert precision.speed_table(ROUNDS)[2] == [
        ["mlp", "1 x cpu", "bf16", "100.0", "100.0", "1.50 (0.50 to 2.00)"],
        ["mlp", "2 x cpu", "bf16", "10.0", "30.0", "3.00 (3.00 to 3.00)"],
    ]
    assert precision.ranges(ROUNDS) == {"mlp": {"1 x cpu": (1.5, 0.5, 2.0), "2 x cpu": (3.0, 3.0, 3.0)}}


def test_accuracies_have_a_mean():
    assert precision.accuracy_table([Learned(0, "bf16", 0.5, 0.75), Learned(1, "bf16", 1.0, 0.5)])[1:] == (
        ["seed", "fp32", "bf16", "difference"],
        [["0", "0.5000", "0.7500", "+0.2500"], ["1", "1.0000", "0.5000", "-0.5000"], ["mean", "0.7500", "0.6250", "-0.1250"]],
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(not can_compute_bf16(), reason="MXNet cannot compute in bfloat16 on this processor")
def test_both_precisions_are_measured():
    messages = []
    found = precision.measure(["cpu:2"], ["mlp"], rounds=2, on_message=messages.append)
    assert messages == ["mlp on cpu:2: 2 rounds"]
    assert [(one.network, one.group, one.low) for one in found] == [("mlp", "2 x cpu", "bf16")] * 2
    assert all(one.full_per_s > 0 and one.low_per_s > 0 for one in found)


def test_an_unknown_device_raises_the_error_of_use_devices(monkeypatch):
    monkeypatch.setattr(precision, "_apart", lambda function, *arguments: function(*arguments))  # in this process
    with pytest.raises(ValueError, match="cpu:0x"):
        precision.measure(["cpu:0x"], ["mlp"], rounds=1)
