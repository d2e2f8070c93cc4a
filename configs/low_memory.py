"""For a 4 GB card at 512x512: less memory, nearly the same experiment.

The effective batch stays 8 (2 images x 4 passes), so learning rate and steps stay those of the default;
BatchNorm sees batches of 2, which changes the result a little.
Costs: a second forward pass for the activations, about a third more computing.
"""
config = {
    'batch_size': 2,
    'accumulation_steps': 4,
    'activation_checkpointing': True,    # the same gradients and BatchNorm statistics as without
    'cache_images': False,               # memory of the machine counts too
}
