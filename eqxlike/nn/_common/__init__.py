"""Helpers that layers share: features, keys, parameters, Gaussian weights, inputs, stacked layers,
windows.
"""

from ._inputs import as_data as as_data
from ._inputs import check_input as check_input
from ._inputs import check_instance as check_instance
from ._inputs import describe as describe
from ._inputs import feature_count as feature_count
from ._inputs import feature_shape as feature_shape
from ._inputs import key_for as key_for
from ._inputs import layer_at as layer_at
from ._inputs import number_of_features as number_of_features
from ._inputs import split_key as split_key
from ._inputs import stack_layers as stack_layers
from ._parameters import Initializer as Initializer
from ._parameters import Parameter as Parameter
from ._parameters import check_key as check_key
from ._parameters import check_real_floating as check_real_floating
from ._parameters import draw as draw
from ._parameters import draw_gaussian as draw_gaussian
from ._parameters import draw_noise as draw_noise
from ._parameters import fan_in_limit as fan_in_limit
from ._parameters import gaussian_kl as gaussian_kl
from ._parameters import rho_for as rho_for
from ._parameters import rho_of as rho_of
from ._parameters import scale_of_each as scale_of_each
from ._windows import Padding as Padding
from ._windows import Pads as Pads
from ._windows import Sizes as Sizes
from ._windows import axis_names as axis_names
from ._windows import check_groups as check_groups
from ._windows import check_padding_mode as check_padding_mode
from ._windows import check_window_fits as check_window_fits
from ._windows import correlate as correlate
from ._windows import draw_kernel as draw_kernel
from ._windows import extend as extend
from ._windows import fold as fold
from ._windows import padding_by_axis as padding_by_axis
from ._windows import pads_for as pads_for
from ._windows import reduce_windows as reduce_windows
from ._windows import sizes_by_axis as sizes_by_axis
from ._windows import window_extents as window_extents
