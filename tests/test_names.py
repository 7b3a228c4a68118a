"""What a newcomer reads first: help(gluon_mgpu) and the public names."""

import pydoc
import re

import gluon_mgpu as mgpu


def test_help_begins_with_the_public_names():
    """It began with a list of internal modules."""
    shown = pydoc.plain(pydoc.render_doc(mgpu))
    first = shown[: shown.index("PACKAGE CONTENTS")]
    assert first.index("use_devices") < first.index("fit") < first.index("Pipeline")
    assert set(mgpu.__all__) <= set(re.findall(r"\w+", mgpu.__doc__))
