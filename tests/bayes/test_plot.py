import itertools
import sys

import jax.numpy as jnp
import matplotlib.collections
import matplotlib.figure
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats

from eqxlike import bayes
from eqxlike.bayes import metrics, plot


@pytest.fixture
def regression():
    """Unsorted inputs, their prediction, and observations."""
    generator = np.random.default_rng(0)
    x = generator.permutation(np.linspace(0, 1, 30, dtype=np.float32))
    means = np.stack([np.sin(x), np.sin(x) + 0.5])
    y = means[0] + generator.normal(0, 0.5, 30).astype(np.float32)
    return x, bayes.Mixture(dist.Normal(means, 0.3)), y


@pytest.fixture
def classes():
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.ones(3), 200).astype(np.float32)
    return probabilities, generator.integers(0, 3, 200)


def line(axes, label):
    (found,) = [each for each in axes.lines if each.get_label() == label]
    return found.get_xydata()


def ends_of_band(axes, label, x):
    """The lower and the upper end of a filled band at `x`, the positions of its corners."""
    (band,) = [each for each in axes.collections if each.get_label() == label]
    corners = band.get_paths()[0].vertices
    at_x = [corners[np.isclose(corners[:, 0], place, atol=1e-6), 1] for place in x]
    return [each.min() for each in at_x], [each.max() for each in at_x]


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def texts(axes):
    return [each.get_text() for each in axes.get_legend().get_texts()]


def test_bands_are_the_intervals_in_the_order_of_x(regression):
    x, prediction, _ = regression
    axes = plot.bands(x, prediction, levels=(0.5, 0.9))
    order = np.argsort(x)
    for level in (0.5, 0.9):
        lower, upper = ends_of_band(axes, f"{level:.0%} interval", x[order])
        np.testing.assert_allclose(lower, prediction.interval(level)[0][order], rtol=1e-5)
        np.testing.assert_allclose(upper, prediction.interval(level)[1][order], rtol=1e-5)
    mean = line(axes, "predictive mean")
    np.testing.assert_allclose(mean, np.stack([x, prediction.mean], 1)[order], rtol=1e-6)


def test_bands_show_observations_and_the_truth(regression):
    x, prediction, y = regression
    axes = plot.bands(x, prediction, y, truth=np.sin(x))
    order = np.argsort(x)
    np.testing.assert_array_equal(line(axes, "observed"), np.stack([x, y], 1)[order])
    np.testing.assert_array_equal(line(axes, "truth"), np.stack([x, np.sin(x)], 1)[order])
    assert texts(axes) == ["90% interval", "50% interval", "predictive mean", "truth", "observed"]


def test_bad_input_is_refused(regression):
    x, prediction, y = regression
    coverage, ranks = plot.coverage, plot.sbc_ranks
    for call, words in [
        (lambda: plot.bands(x, prediction, y[1:]), r"x \(30,\), prediction \(30,\), y \(29,\)"),
        (lambda: plot.bands(x[:, None], prediction), r"same shape \(N,\), got x \(30, 1\), pred"),
        (lambda: plot.bands(x, prediction, levels=()), "at least one level"),
        (lambda: coverage(prediction, jnp.zeros(29)), r"y and prediction of the same shape \(N,\)"),
        (lambda: coverage(prediction, jnp.zeros((30, 1))), r"of the same shape \(N,\)"),
        (lambda: coverage(prediction, jnp.zeros(())), r"of the same shape \(N,\)"),
        (
            lambda: ranks(np.zeros((5, 1), int), 3),
            r"integers of shape \(N,\), got int64 of .*5, 1\)",
        ),
        (lambda: ranks(np.zeros(5), 3), r"integers of shape \(N,\), got float64 of shape \(5,\)"),
        (lambda: ranks(np.arange(5), 3), "ranks from 0 to num_draws, 3, got ranks from 0 to 4"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    for show in (plot.bands, coverage):
        with pytest.raises(TypeError, match=rf"{show.__name__} expects a bayes\.Mixture, got nd"):
            show(x, y)


def test_coverage_counts_targets_in_the_intervals(regression):
    _, prediction, y = regression
    axes = plot.coverage(prediction, y)
    drawn = line(axes, "observed")
    for level in (0.25, 0.5, 0.9):
        expected = metrics.coverage(y, *prediction.interval(level))
        np.testing.assert_allclose(np.interp(level, *drawn.T), expected, rtol=1e-6)
    np.testing.assert_array_equal(line(axes, "as claimed"), [[0, 0], [1, 1]])
    inside = metrics.coverage(y, *prediction.interval(0.9))
    assert axes.get_title() == f"90% intervals hold {inside:.1%} of 30"


def test_band_of_coverage_has_binomial_quantiles(regression):
    _, prediction, y = regression
    axes = plot.coverage(prediction, y)
    levels = [0.0, 0.1, 0.5, 0.93, 1.0]
    lower, upper = ends_of_band(axes, "90% of calibrated predictions", levels)
    np.testing.assert_allclose(lower, scipy.stats.binom(30, levels).ppf(0.05) / 30, atol=1e-12)
    np.testing.assert_allclose(upper, scipy.stats.binom(30, levels).ppf(0.95) / 30, atol=1e-12)


@pytest.mark.parametrize("equal", ["width", "mass"])
def test_reliability_shows_the_bins(equal, classes):
    axes = plot.reliability(*classes, 5, equal=equal)
    bins = metrics.calibration_bins(*classes, 5, equal=equal)
    is_filled = np.asarray(bins.count) > 0
    np.testing.assert_allclose(heights(axes), bins.accuracy[is_filled], rtol=1e-6)
    widths = [bar.get_width() for bar in axes.patches]
    np.testing.assert_allclose(widths, np.diff(bins.edges)[is_filled], rtol=1e-5)
    assert [text.get_text() for text in axes.texts] == [str(n) for n in bins.count[is_filled]]
    (points,) = axes.containers[-1].lines[:1]
    expected = np.stack([bins.confidence, bins.accuracy], 1)[is_filled]
    np.testing.assert_allclose(points.get_xydata(), expected, rtol=1e-6)
    assert axes.get_title() == f"ECE {metrics.ece(*classes, 5, equal=equal):.3f}, 200 predictions"


def test_bars_of_accuracy_are_wilsons_intervals(classes):
    axes = plot.reliability(*classes, 5)
    bins = metrics.calibration_bins(*classes, 5)
    (segments,) = [
        each.get_segments()
        for each in axes.collections
        if isinstance(each, matplotlib.collections.LineCollection)
    ]
    filled = [m for m in range(5) if bins.count[m]]
    for m, segment in zip(filled, segments, strict=True):
        right = round(float(bins.accuracy[m]) * int(bins.count[m]))
        test = scipy.stats.binomtest(right, int(bins.count[m]))
        interval = test.proportion_ci(0.9, method="wilson")
        np.testing.assert_allclose(segment[:, 1], interval, atol=1e-4)


@pytest.mark.parametrize(("num_draws", "num_bins"), [(99, 7), (4, 20)])
def test_sbc_ranks_have_the_band_of_binomial_counts(num_draws, num_bins):
    ranks = np.random.default_rng(0).integers(0, num_draws + 1, 200)
    axes = plot.sbc_ranks(ranks, num_draws, num_bins=num_bins)
    ends = [bar.get_x() for bar in axes.patches] + [num_draws + 0.5]
    assert len(axes.patches) == min(num_bins, num_draws + 1)
    np.testing.assert_array_equal(heights(axes), np.histogram(ranks, ends)[0])
    chances = np.diff(ends) / (num_draws + 1)
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    for tail in (0.005, 0.995):
        for end, count in zip(ends[:-1], scipy.stats.binom(200, chances).ppf(tail), strict=True):
            assert [end, count] in corners.tolist()


def everything(regression, classes, **options):
    x, prediction, y = regression
    yield plot.bands(x, prediction, **options)
    yield plot.coverage(prediction, y, **options)
    yield plot.reliability(*classes, **options)
    yield plot.sbc_ranks(np.arange(5), 4, **options)


def extents(axes):
    """The areas of the axes, their title and their legend, in pixels."""
    return [each.get_window_extent() for each in (axes, axes.title, axes.get_legend())]


def test_legends_in_a_row_do_not_overlap_titles_data_or_other_axes(regression, classes):
    figure = matplotlib.figure.Figure(figsize=(9, 3), layout="constrained")
    panels = figure.subplots(1, 3)
    x, prediction, y = regression
    for axes in panels[:2]:
        plot.bands(x, prediction, y, truth=np.sin(x), ax=axes)
        axes.set_title("a title that is as wide as the axes")
    plot.reliability(*classes, ax=panels[2])
    figure.draw_without_rendering()
    boxes = [box for axes in panels for box in extents(axes)]
    for box, other in itertools.combinations(boxes, 2):
        assert not box.overlaps(other)
    for box in boxes:
        assert (box.min >= figure.bbox.min).all()
        assert (box.max <= figure.bbox.max).all()


def test_legend_is_inside_axes_without_space_around_them(regression, classes):
    given = matplotlib.figure.Figure().subplots()
    for axes in everything(regression, classes, ax=given):
        assert axes is given
        frame, _, legend = extents(axes)
        assert frame.contains(*legend.min)
        assert frame.contains(*legend.max)


def test_legend_is_at_the_requested_location(regression, classes):
    for axes in everything(regression, classes, legend="lower right"):
        frame, _, legend = extents(axes)
        corner, place = (np.array([each.x1, each.y0]) for each in (frame, legend))
        assert np.abs(corner - place).max() < 10


def test_new_figures_are_not_registered_in_pyplot_and_legends_are_optional(regression, classes):
    drawn = list(everything(regression, classes, legend=False))
    assert all(axes.get_legend() is None for axes in drawn)
    figures = [axes.figure for axes in drawn]
    assert len({id(figure) for figure in figures}) == 4
    assert not any(hasattr(figure.canvas.manager, "num") for figure in figures)


def test_error_without_matplotlib_names_the_extra(regression, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    x, prediction, _ = regression
    message = r"plot\.bands needs matplotlib: `pip install 'eqxlike\[plot\]'`"
    with pytest.raises(ImportError, match=message):
        plot.bands(x, prediction)
