"""timm's test networks have 45 weights and more; this encoder has 15, and a run saves each of them six times."""
import timm
from timm.models._builder import build_model_with_cfg
from torch import nn


class FiveConvs(nn.Module):
    """Five times a convolution, a norm and a ReLU, each of half the size of the one before."""

    def __init__(self, in_chans=3, num_classes=0, global_pool=''):
        super().__init__()
        self.feature_info = []
        for number, width in enumerate((16, 24, 32, 48, 64)):
            name = f'stage{number}'
            self.add_module(name, nn.Sequential(nn.Conv2d(in_chans, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width),
                                                nn.ReLU()))
            self.feature_info.append({'num_chs': width, 'reduction': 2 ** (number + 1), 'module': name})
            in_chans = width


@timm.models.register_model
def test_five_convs(pretrained=False, **how):
    """tu-test_five_convs"""
    return build_model_with_cfg(FiveConvs, 'test_five_convs', pretrained, **how)
