"""What a list's query may say."""

from hypothesis import given
from hypothesis import strategies as st
from rushes_api.errors import ApiError
from rushes_api.video_filters import FILTER_PARAMETERS, filters_of
from rushes_core.listing import page
from rushes_core.states import states_with_status
from sqlalchemy.dialects import postgresql

NAMES = st.sampled_from([*FILTER_PARAMETERS[:-1], "metadata[a]", "metadata[]", "metadata[[]]"])
VALUES = (
    st.text(max_size=30)
    | st.integers(-(10**13), 10**13).map(str)
    | st.floats().map(str)
    | st.datetimes().map(lambda moment: f"{moment.isoformat()}Z")
    | st.sampled_from(["queued,failed", "completed", "253402300799.999999"])
)


@given(parameters=st.dictionaries(NAMES, VALUES, max_size=4))
def test_no_query_does_anything_but_filter_or_be_refused(parameters: dict[str, str]) -> None:
    try:
        filters = filters_of(parameters, states_with_status)
    except ApiError as refused:
        error: ApiError | None = refused
    else:
        error = None
        statement = page(project="default", filters=filters, after=None, limit=20, descending=True)
        assert str(statement.compile(dialect=postgresql.dialect()))
    if error is not None:
        assert error.param in {name.partition("[")[0] for name in parameters}
        assert str(error).encode()
