"""What ranks that share a layer send, and how long it takes, by hand."""

import pytest

from holdfast.planner import Device
from holdfast.planner.layouts import (
    Layout,
    Link,
    activation_bytes,
    gathered,
    gradient_bytes,
    reduced,
    state_bytes,
    weight_bytes,
)


def test_links_send_what_their_vendor_states():
    for name, rate in (("h200", 450e9), ("h100", 450e9), ("a100", 300e9)):
        assert Link.between("nvlink", Device.named(name)) == Link("nvlink", rate)
    assert Link.between("ib", Device.named("rtx4090")) == Link("ib", 50e9)
    with pytest.raises(ValueError, match="link: expected 'ib' for a40, as nvlink is known of h200, h100, a100"):
        Link.between("nvlink", Device.named("a40"))
    with pytest.raises(ValueError, match="link: expected one of nvlink, ib; got 'pcie'"):
        Link.between("pcie", Device.named("h200"))


def test_a_rank_sends_all_parts_but_those_that_end_with_it():
    """Around a ring of 4 each part of 5 bytes goes 3 times on; a sum goes round twice."""
    assert gathered(20, 4) == 3 * 5
    assert reduced(20, 4) == 2 * 3 * 5
    assert gathered(20, 1) == reduced(20, 1) == 0


def test_bytes_of_both_passes():
    # a message of 10 bytes to three others, and three gradients
    assert state_bytes(10, 4) == 60
    # 6 tokens of 8 channels of 2 bytes; four sums
    assert activation_bytes(6, 8, 2, 4) == 4 * 2 * 3 * 6 * 8 * 2 / 4
    # gathered twice and scattered once, in float32
    assert weight_bytes(100, 4) == 3 * 300
    assert gradient_bytes(100, 4) == 2 * 300


def test_what_is_waited_for_adds_up_and_the_rest_hides():
    link = Link("", 100.0)
    assert Layout("", "", 2.0).on(link) == 2
    assert Layout("", "", 2.0, waits=50).on(link) == 2.5
    assert Layout("", "", 2.0, meanwhile=199).on(link) == 2
    assert Layout("", "", 2.0, meanwhile=300).on(link) == 3
    assert Layout("", "", 2.0, waits=50, meanwhile=300).on(link) == 3.5
    assert Layout("", "", None, waits=50).on(link) is None
