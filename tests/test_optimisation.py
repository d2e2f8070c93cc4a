"""Optimisation: optimizer, learning rate, moving average of the weights.

Run: python -m pytest tests/test_optimisation.py
"""
import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import train_unet as tu
from helpers import CPU, PLAIN, assert_same, batch_of, fresh, network, settings, squares, train

pytestmark = pytest.mark.usefixtures('one_thread')


# --- the learning rate ----------------------------------------------------------------


@pytest.mark.parametrize('warmup', [0, 0.1, 0.5])
def test_learning_rate_rises_in_a_line_and_falls_as_a_cosine(warmup):
    config = {'learning_rate': 2.0, 'warmup_fraction': warmup}
    rates = [tu.lr_at_step(step, 100, config) for step in range(101)]
    peak = round(100 * warmup)
    assert rates[:peak] == pytest.approx([2 * (step + 1) / peak for step in range(peak)])
    assert rates[peak] == max(rates) == 2
    assert rates[peak + (100 - peak) // 2] == pytest.approx(2 * 0.505)
    assert all(a > b for a, b in zip(rates[peak:], rates[peak + 1:]))
    assert rates[100] == pytest.approx(0.02)


def test_the_learning_rate_of_each_step_reaches_the_optimizer():
    rates = []
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append({group['lr'] for group in optimizer.param_groups}))
    with_warmup = dict(warmup_fraction=0.5, num_epochs=2)
    try:
        train(**with_warmup)
    finally:
        handle.remove()
    assert rates[-4:] == [{tu.lr_at_step(step, 4, {**PLAIN, **with_warmup})} for step in range(4)]


# --- the optimizer --------------------------------------------------------------------


def test_momentum_is_for_sgd_alone():
    config = settings(optimizer='RMSprop')
    assert fresh(config).optimizer.defaults['momentum'] == 0
    assert fresh({**config, 'optimizer': 'SGD'}).optimizer.defaults['momentum'] == 0.9


def test_norms_of_any_shape_and_embeddings_do_not_decay():
    model = nn.ModuleDict({'norm': nn.LayerNorm([4, 8, 8]), 'table': nn.Embedding(5, 3), 'linear': nn.Linear(3, 3)})
    optimizer = tu.build_optimizer(model, settings(optimizer='AdamW'), CPU)
    assert [len(group['params']) for group in optimizer.param_groups] == [1, 4]


def test_embeddings_that_are_plain_parameters_do_not_decay():
    model = nn.Module()
    model.pos_embed, model.weight = nn.Parameter(torch.ones(1, 4, 8)), nn.Parameter(torch.ones(4, 8))
    model.block = nn.Module()
    model.block.relative_position_bias_table = nn.Parameter(torch.ones(9, 2))
    groups = tu.build_optimizer(model, {**tu.CONFIG, 'learning_rate': 0.1}, torch.device('cpu')).param_groups
    assert [(len(group['params']), group['weight_decay'] > 0) for group in groups] == [(1, True), (2, False)]


# --- the moving average ---------------------------------------------------------------


def test_moving_average_by_hand():
    config = settings(ema_decay=0.3)
    state = fresh(config, network(norm=False))
    expected = [p.detach().clone() for p in state.model.parameters()]
    for step in range(5):
        state.step = step
        tu.guarded_step(state, [batch_of(step, 8, 9)], squares, config)
        decay = min(0.3, (1 + step) / (10 + step))                     # 0.1, 0.18, 0.25, 0.3, 0.3
        expected = [decay * e + (1 - decay) * p.detach()
                    for e, p in zip(expected, state.model.parameters())]
    with state.evaluated() as model:
        for a, b in zip(model.parameters(), expected):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_the_averaged_weights_come_and_go_to_the_bit():
    state = fresh(settings(ema_decay=0.9), network())
    state.model.register_buffer('view', state.model[0].weight.detach()[0])         # shares memory with a weight
    vars(state).pop('parts', None)                                     # found anew
    state.average = state.parts.copy()
    for step in range(2):
        tu.guarded_step(state, [batch_of(step, 1)], squares, settings(ema_decay=0.9))
    own, places = copy.deepcopy(state.model.state_dict()), [p.data_ptr() for p in state.model.parameters()]
    averaged = copy.deepcopy(state.weights())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), state.evaluated() as model:
            assert_same(model.state_dict(), averaged)
            model.eval()
            1 / 0
        assert model.training and places == [p.data_ptr() for p in model.parameters()]
        assert_same(model.state_dict(), own)
    assert not any(torch.equal(own[name], averaged[name]) for name, _ in state.model.named_parameters())


@pytest.mark.parametrize('error', [torch.OutOfMemoryError('CUDA out of memory'),
                                   RuntimeError('MPS backend out of memory (MPS allocated: 8 GB)')])     # Apple's
@pytest.mark.parametrize('failing', range(2, 5))
def test_a_full_gpu_does_not_leave_averaged_weights_in_the_model(monkeypatch, failing, error):
    """What is saved then would train on from them."""
    state, calls, real = fresh(settings(ema_decay=0.9), network()), [], torch.Tensor.clone
    tu.guarded_step(state, [batch_of(0, 1)], squares, settings(ema_decay=0.9))
    own, averaged = copy.deepcopy(state.model.state_dict()), copy.deepcopy(state.weights())

    def full(tensor, **how):
        calls.append(1)
        if len(calls) % failing == 0:
            raise error
        return real(tensor, **how)

    monkeypatch.setattr(torch.Tensor, 'clone', full)
    with state.evaluated() as model:
        assert_same(model.state_dict(), averaged)
    assert_same(state.model.state_dict(), own)
    assert len(calls) > 2 * failing


def test_a_statistic_under_two_names_is_averaged_once():
    model = network()
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    model.register_buffer('running_mean', norm.running_mean)
    state = fresh(settings(ema_decay=0.9), model)
    assert not norm.running_mean.any()
    tu.guarded_step(state, [batch_of(0, 1)], squares, settings(ema_decay=0.9))
    assert norm.running_mean.any() and torch.allclose(state.weights()['running_mean'], 0.9 * norm.running_mean)


def test_the_average_copies_a_buffer_that_holds_infinity():
    model = network()
    model.register_buffer('mask', torch.full((3, 3), -math.inf))
    state = fresh(settings(), model)
    model.mask[0] = 0                                                  # as a counter, it changes in training
    tu.guarded_step(state, [batch_of(0, 1)], squares, settings())
    assert torch.equal(state.weights()['mask'], model.mask)


def test_complex_weights_are_averaged_too():
    """Fourier layers have them: they were copied, beside averages of all others."""
    model = nn.ParameterDict({'real': torch.ones(3), 'complex': torch.ones(3, dtype=torch.cfloat)})
    parts = tu.Parts(model)
    average = parts.copy()
    with torch.no_grad():
        model['real'] += 1
        model['complex'] += 1j
    tu.update_average(average, parts, 0.5, 100, torch.tensor(1.0))
    real, of_complex = sorted(average[0], key=torch.is_complex)
    assert torch.equal(of_complex, torch.full((3,), 1 + 0.5j)) and real.tolist() == [1.5] * 3


def test_what_an_average_copies_goes_by_type(monkeypatch):
    """A GPU copies a list of mixed types one by one: a launch for every counter of a network, in every step."""
    real, kinds = torch._foreach_copy_, []
    monkeypatch.setattr(torch, '_foreach_copy_',
                        lambda to, of: (kinds.append({x.dtype for x in (*to, *of)}), real(to, of)))
    model = nn.BatchNorm2d(1)
    model.register_buffer('mask', torch.ones(2))
    parts = tu.Parts(model)
    average = parts.copy()
    model.num_batches_tracked += 3
    model.mask[0] = 0
    tu.update_average(average, parts, 0.5, 100, torch.tensor(1.0))
    assert sorted(map(len, kinds)) == [1, 1]
    assert sorted(float(x.sum()) for x in average[1]) == [1, 3]
