"""Specs: the names that classes are stored under do not depend on where their modules are."""

import pytest

from credibly import likelihoods, methods, priors
from credibly.core.specs import from_spec, kind_name, kinds_of, to_spec
from credibly.errors import StoreError
from credibly.gaussians.families import FullRank, LowRank, MeanField
from credibly.networks.normalisation import FilterResponseNorm, FrozenBatchNorm
from credibly.networks.zoo import CNNLSTM, ResNet20FRN, UnrolledLSTM


def test_stored_names():
    """Run folders hold these names: a change would make old ones unreadable."""
    stored = {
        "families": (FullRank, LowRank, MeanField),
        "likelihoods": (likelihoods.Gaussian,),
        "methods": (methods.HMC,),
        "norms": (FilterResponseNorm, FrozenBatchNorm),
        "priors": (priors.Normal,),
        "zoo": (CNNLSTM, ResNet20FRN, UnrolledLSTM),
    }
    for home, classes in stored.items():
        for cls in classes:
            assert kind_name(cls) == f"{home}.{cls.__name__}"


def test_round_trip_and_unknown_kinds():
    spec = to_spec(priors.Normal(2.0))
    assert spec["kind"] == "priors.Normal"
    assert from_spec(spec, kinds_of(priors.Normal)) == priors.Normal(2.0)
    with pytest.raises(StoreError, match=r"made with 'priors\.Normal', which this version does not know"):
        from_spec(spec, kinds_of(priors.Laplace))
