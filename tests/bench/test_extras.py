import pytest

from gradwire.bench.extras import MissingPackageError, need


def test_a_missing_package_names_the_extra():
    with pytest.raises(MissingPackageError, match=r"pip install 'gradwire\[cli,report\]'"):
        need("json", "no_such_package", extra="cli,report", purpose="a test")


def test_what_is_there_is_not_missed():
    need("json", extra="cli", purpose="a test")
