"""A hardware-aware gate in a model of your own, from the first call to tuned coefficients."""

# %% [markdown]
# # A gate that knows the machine
#
# Thirty-two tokens choose experts. The experts lie on nodes, and the layer is done when the busiest
# node is. `moejax.gating` lets a token take a slightly less wanted expert on an idle node instead.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from moejax import gating, metrics, zoo


EXPERTS, NODES, TOP_K, HIDDEN, TOKENS = 16, 8, 2, 8, 32
share = jnp.eye(NODES)[jnp.arange(EXPERTS) % NODES]  # expert i lies on node i mod 8
costs = gating.LayerCosts(1e-6, 1e-7, 1e-8, top_k=TOP_K)  # s of a token, a visit, a gate step

# %% [markdown]
# ## Twenty lines of Equinox
#
# The gate is a layer. It takes router logits, or hidden states and the router, and hands back
# expert ids and weights. With coefficients 0 it is plain top-k, to the bit.


# %%
class MoE(eqx.Module):
    router: jax.Array
    experts: jax.Array
    gate: gating.HardwareAwareGate

    def __init__(self, gate, *, key):
        router_key, expert_key = jax.random.split(key)
        self.router = jax.random.normal(router_key, (HIDDEN, EXPERTS))
        self.experts = jax.random.normal(expert_key, (EXPERTS, HIDDEN, HIDDEN)) * HIDDEN**-0.5
        self.gate = gate

    def __call__(self, x):
        chosen = self.gate(x, router=self.router)
        outputs = jnp.einsum("th,tkhi->tki", x, self.experts[chosen.expert_ids])
        return jnp.einsum("tk,tki->ti", chosen.weights, jax.nn.gelu(outputs)), chosen


def gate(r_comp, protect=1):
    options = dict(top_k=TOP_K, r_comm=0.0, token_time=costs.token_time)
    return gating.HardwareAwareGate(share, r_comp=r_comp, protect=protect, **options)


x = jax.random.normal(jax.random.key(0), (TOKENS, HIDDEN)) + 0.7
plain, aware = (MoE(gate(r), key=jax.random.key(1)) for r in (0.0, -1e5))
(y, before), (z, after) = plain(x), aware(x)
busiest = [1e6 * result.node_load.max() for result in (before, after)]
print(f"busiest node: {busiest[0]:.0f} us, then {busiest[1]:.0f} us")
print(f"choices kept: {metrics.top_k_overlap(before.expert_ids, after.expert_ids):.0%}")
print(f"favorites kept: {metrics.top1_retention(before.expert_ids, after.expert_ids):.0%}")

# %% [markdown]
# ## Plain JAX, Flax, anything
#
# One function of arrays, under `jax.jit`, `jax.vmap` and `jax.grad`. In a Flax module it is called
# just so.


# %%
@jax.jit
def route(logits):
    scores = jax.nn.softmax(logits)
    rates = dict(r_comp=-1e5, r_comm=0.0, token_time=1e-6)
    result = gating.hardware_aware_top_k(scores, share, top_k=TOP_K, protect=1, **rates)
    return result.expert_ids, result.weights


logits = x @ plain.router
expert_ids, weights = route(logits)
assert jnp.array_equal(expert_ids, after.expert_ids)

# %% [markdown]
# ## Tuned by gradient
#
# How strong should the coefficients be? Say how much combine weight tokens may lose on average. The
# gate below also looks ahead at what later tokens want, and sees all nodes, not the busiest only.

# %%
form = gating.GateForm(protect=1, ahead=True, soft=True)
many = jax.random.normal(jax.random.key(2), (256, HIDDEN)) + 0.7
scores = jax.nn.softmax(many @ plain.router)[None]  # of one layer
fit, heldout = scores[:, :128], scores[:, 128:]
tuned = gating.tune(
    fit, share, costs, [0.02, 0.05], batch=TOKENS, key=jax.random.key(3), form=form,
    heldout=heldout, steps=10,
)  # fmt: skip
for speedup, loss in zip(tuned.heldout.speedup, tuned.heldout.loss):
    print(f"on tokens not fitted to: {speedup:.2f} times as fast, {loss:.1%} of the weight lost")
coefficients = jax.tree.map(lambda leaf: leaf[1, 0], tuned.coefficients)
chosen = gating.tuned_gate(jax.nn.softmax(logits), share, costs, coefficients, form)

# %% [markdown]
# ## A router trained for the machine
#
# `hardware_penalty` is the expected layer time as a loss, 1 where the load is even: put it where a
# load-balance loss was.


# %%
def loss(router):
    penalty, aux = gating.hardware_penalty(x @ router, share, costs)
    return penalty + 0.1 * jnp.square(router - plain.router).mean(), aux


optimizer = optax.adam(0.05)


@jax.jit
def step(router, state):
    (_, aux), slope = jax.value_and_grad(loss, has_aux=True)(router)
    update, state = optimizer.update(slope, state)
    return optax.apply_updates(router, update), state, aux.imbalance


router, state, imbalance = plain.router, optimizer.init(plain.router), []
for _ in range(30):
    router, state, found = step(router, state)
    imbalance.append(float(found))
print(f"largest over mean load expected: {imbalance[0]:.2f}, trained {imbalance[-1]:.2f}")

# %% [markdown]
# ## What it costs a language model
#
# The zoo model takes any gate. Its next-byte distribution tells what was lost.

# %%
model = zoo.load()
text = jnp.asarray(zoo.heldout(TOKENS))
config = model.config
spread = jnp.eye(16)[jnp.arange(config.num_experts) % 16]
strong = gating.HardwareAwareGate(
    spread, top_k=config.top_k, r_comp=-3e4, r_comm=-0.025, token_time=6e-7, protect=1
)
forward = eqx.filter_jit(lambda model, gate: model(text, gate=gate))
lost = metrics.kl(forward(model, None), forward(model, strong.choose))
print(f"KL from the model as it was: {lost:.4f} nats a byte")
