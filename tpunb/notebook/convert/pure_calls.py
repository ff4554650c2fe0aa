"""Functions and methods that are known to have no side effects.

They change no state that a later cell reads: no argument, no file, no setting, and no random
generator. Checked in the sources of Python 3.13, numpy 2.3, pandas 3.0, matplotlib 3.11 and
seaborn 0.13, whose `stripplot` and `catplot`, for example, draw random numbers and are excluded.
"""

from __future__ import annotations

LOOK_AT_ANYTHING = frozenset(
    "abs bool callable float format hash id int isinstance len repr round str type".split()
)
"""Built-in functions that are safe with any argument."""

ITERATE = frozenset(
    "all any dict enumerate list max min range reversed set sorted sum tuple zip".split()
)
"""Built-in functions that iterate over their arguments. They are safe only if the iteration is:
iterating over a shuffled loader draws random numbers."""

ITERATE_OPTIONS = frozenset("default reverse start strict".split())
"""Keyword arguments of `ITERATE` that are values and not functions."""

MODULES = ("math", "os.path", "platform", "textwrap")
"""Modules of which all functions are safe."""

FUNCTIONS = frozenset(
    [
        *("collections.Counter", "json.dumps", "os.getcwd", "os.listdir", "glob.glob"),
        *("pprint.pprint", "pprint.pp", "pprint.pformat", "tpunb.runs", "tpunb.diagnose"),
        *(f"IPython.display.{name}" for name in "display HTML Markdown Latex Math Code".split()),
        *(f"IPython.display.{name}" for name in "Image SVG Audio Video IFrame JSON".split()),
        *(
            f"numpy.{name}"
            for name in (
                "abs all any arange argmax argmin argsort array asarray bincount ceil clip "
                "concatenate corrcoef count_nonzero cov cumsum diff exp expand_dims floor "
                "full histogram hstack isfinite isnan linspace log log10 log1p log2 max maximum "
                "mean median min minimum nanmean ones percentile prod quantile ravel reshape "
                "round shape sort sqrt squeeze stack std sum transpose unique var vstack where "
                "zeros"
            ).split()
        ),
        *(
            f"pandas.{name}"
            for name in (
                "DataFrame Index Series concat crosstab cut date_range isna merge notna "
                "pivot_table qcut read_csv read_excel read_feather read_json read_parquet "
                "to_datetime unique value_counts"
            ).split()
        ),
        *(
            f"torch.{name}"
            for name in (
                "arange argmax cat eye from_numpy full linspace mean ones stack sum tensor zeros"
            ).split()
        ),
    ]
)

MAKE_DATA = FUNCTIONS | {
    f"torch.{name}"
    for name in "as_tensor empty rand rand_like randint randn randn_like randperm".split()
}
"""Functions that return data; some of them draw random numbers."""
MAKE_NO_DATA = frozenset(name for name in FUNCTIONS if name.startswith("IPython."))

ITERATORS = frozenset("elements flat items iterrows itertuples iteritems".split())
"""Attributes of data that are iterators, which are exhausted after one pass."""

LOOKING_METHODS = frozenset(
    (
        "abs agg aggregate all any argmax argmin argsort astype between bool capitalize clip "
        "clone contains copy corr count cov cpu cummax cumsum describe detach diagonal diff dim "
        "drop drop_duplicates dropna duplicated elements endswith explode extract ffill fillna "
        "find flatten float floor format get groupby head idxmax idxmin iloc index info int "
        "isin isna isnull item items iterrows itertuples join keys len loc log lower lstrip max "
        "mean median melt memory_usage merge min mode most_common nlargest norm notna notnull "
        "nsmallest numel numpy nunique pct_change permute pivot pivot_table prod quantile "
        "rank ravel rename replace reset_index reshape rolling round rsplit rstrip "
        "select_dtypes set_index shift size skew sort_index sort_values split sqrt squeeze "
        "stack startswith std strftime strip sum tail title to_dict to_frame to_list "
        "to_numpy to_string tolist transpose unique unsqueeze unstack upper "
        "value_counts values var view xs zfill"
    ).split()
)
"""Methods of numbers, strings, arrays, tensors and tables."""

MAKING_METHODS = LOOKING_METHODS | set(
    "add apply assign decode div eq filter float half long map mul pipe query sample sub to "
    "type where".split()
)
"""Methods that return data."""

CHANGING_OPTIONS = frozenset(["inplace", "out", "buf"])
"""Keyword arguments that give otherwise safe calls a side effect."""

PLOT_METHODS = frozenset(["boxplot", "hist", "plot"])
"""Methods of tables that draw."""

HOLDER_METHODS = frozenset("copy count get index items keys values".split())
"""Methods of lists, dicts and sets that are safe for elements of any type."""

MODEL_METHODS = frozenset(
    "buffers named_buffers named_parameters parameters state_dict children modules "
    "named_children named_modules".split()
)
MODEL_PARTS = frozenset("children modules named_children named_modules".split())
"""The `MODEL_METHODS` that return models and not tensors."""
SAME_MODEL = frozenset("bfloat16 cpu cuda double eval float half to train".split())
"""Methods of a model that return it."""

RESULT_METHODS = frozenset(["cores", "explain", "metrics", "plot"])

PLOTTING = ("matplotlib", "pylab", "seaborn", "plotly")
"""Packages that draw."""

_SEABORN = frozenset(
    (
        "barplot boxenplot boxplot countplot despine displot ecdfplot heatmap histplot kdeplot "
        "lineplot rugplot scatterplot violinplot"
    ).split()
)
_NOT_DRAWN = ("imsave", "rc", "savefig", "set_cmap", "style", "switch_backend", "xkcd")
_FILES = ("save", "to_", "write")

CONTEXTS = frozenset(
    [
        *("torch.no_grad", "torch.inference_mode", "numpy.printoptions"),
        *("pandas.option_context", "matplotlib.pyplot.style.context"),
        *("matplotlib.pyplot.rc_context", "seaborn.axes_style", "warnings.catch_warnings"),
    ]
)
"""Context managers whose effect is undone at the end of the `with` statement."""

IMPORTS = (
    *PLOTTING,
    *("IPython", "collections", "glob", "itertools", "json", "math", "numpy", "os", "pandas"),
    *("platform", "pprint", "textwrap", "tpunb", "warnings"),
)
"""Packages whose import does not affect the results of a run."""


def draws(name: str) -> bool:
    """True if a function, given by its full name, only draws."""
    package, _, rest = name.rpartition(".")
    if package == "matplotlib.pyplot":
        return not rest.startswith(_NOT_DRAWN)
    if package == "seaborn":
        return rest in _SEABORN
    return package in ("plotly.express", "plotly.graph_objects", "plotly.subplots")


def draws_on(method: str) -> bool:
    """True if a method of a figure or of its axes only draws."""
    return not method.startswith(_FILES)
