"""Layers of the trunk: each owns its packed weights and calls kernels; none knows requests or pools' owners.

steps    what a forward needs besides weights          block, dense_block     the residual blocks, hybrid and dense
paged    what all attention layers share               gated_attention, attention   of hybrid and of dense models
latent_attention   heads that attend to latents        key_index   which keys they see, where attention is sparse
taps     outputs of named layers for a drafter
local    the same rows in the rings of sliding layers  gated_delta    the recurrent mixer
mlp, mixture   the feed-forward layer, one or of experts    mtp_head   of every family that has one
"""
