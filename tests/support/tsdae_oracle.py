"""TSDAE by its equations under torch autograd: one sentence at a time on its real words, so that no mask and no padding
is in it; each head by itself; attention over the one row as over any other."""

import math

from oracles import pytorch, tensors


class Reference:
    """The same values as a TSDAE, as torch leaves under its names; a tied decoder reads the encoder's."""

    def __init__(self, model):
        self.settings, self.leaves = model.settings, tensors(model)

    def __getitem__(self, name):
        return self.leaves[name if name in self.leaves else name.replace("decoder.", "encoder.", 1)]

    def loss(self, noisy, clean):
        """The mean of -log p over every word of every clean sentence but its first; [id] lists, [CLS] ... [SEP]."""
        torch = pytorch()
        logits = [self.logits(self.vector(source), target[:-1]) for source, target in zip(noisy, clean)]
        words = torch.tensor([word for target in clean for word in target[1:]])
        log_p = torch.log_softmax(torch.cat(logits), 1)
        return -log_p[torch.arange(len(words)), words].mean()

    def vector(self, ids):
        x = self.words("encoder", ids)
        for n in range(self.settings["layers"]):
            x = self.block(x, f"encoder.layers.{n}.attention", lambda z, part: self.attention(z, z, part))
            x = self.block(x, f"encoder.layers.{n}.feed_forward", self.feed_forward)
        x = self.last(x, "encoder")
        return {"cls": lambda: x[0], "mean": lambda: x.sum(0) / len(x), "max": lambda: x.max(0).values}[
            self.settings["pooling"]]()

    def logits(self, s, ids):
        torch, x = pytorch(), self.words("decoder", ids)
        for n in range(self.settings["layers"]):
            x = self.block(x, f"decoder.layers.{n}.attention", lambda z, part: self.attention(z, z, part, True))
            x = self.block(x, f"decoder.layers.{n}.cross_attention", lambda z, part: self.attention(z, s[None], part))
            x = self.block(x, f"decoder.layers.{n}.feed_forward", self.feed_forward)
        x = self.last(x, "decoder") @ self["decoder.transform.W"] + self["decoder.transform.b"]
        approximate = "tanh" if self.settings["activation"] == "gelu_tanh" else "none"
        x = self.normed(torch.nn.functional.gelu(x, approximate=approximate), "decoder.transform_norm")
        return x @ self["decoder.words.embedding.W"].T + self["decoder.b_v"]

    # ---- parts -------------------------------------------------------------------------------------------

    def words(self, half, ids):
        x = self[f"{half}.words.embedding.W"][list(ids)] + self[f"{half}.words.positions.P"][:len(ids)]
        return self.normed(x, f"{half}.words.norm") if self.settings["norm"] == "post" else x

    def last(self, x, half):
        return self.normed(x, f"{half}.words.norm") if self.settings["norm"] == "pre" else x

    def block(self, x, part, f):
        if self.settings["norm"] == "pre":
            return x + f(self.normed(x, f"{part}_norm"), part)
        return self.normed(x + f(x, part), f"{part}_norm")

    def normed(self, x, name):
        gain, bias = self[f"{name}.gain"], self[f"{name}.bias"]
        return pytorch().nn.functional.layer_norm(x, gain.shape, gain, bias, 1e-5)

    def attention(self, x, keys, part, causal=False):
        torch = pytorch()
        q, k, v = (rows @ self[f"{part}.W_{name}"] + self[f"{part}.b_{name}"]
                   for name, rows in (("q", x), ("k", keys), ("v", keys)))
        heads, e = [], q.shape[1] // self.settings["heads"]
        for columns in (slice(n, n + e) for n in range(0, q.shape[1], e)):
            S = q[:, columns] @ k[:, columns].T / math.sqrt(e)
            if causal:
                S = S + torch.full(S.shape, -math.inf).triu(1)
            heads.append(torch.softmax(S, 1) @ v[:, columns])
        return torch.cat(heads, 1) @ self[f"{part}.W_o"] + self[f"{part}.b_o"]

    def feed_forward(self, x, part):
        functional, activation = pytorch().nn.functional, self.settings["activation"]
        z = x @ self[f"{part}.W_1"] + self[f"{part}.b_1"]
        a = functional.relu(z) if activation == "relu" else functional.gelu(
            z, approximate="tanh" if activation == "gelu_tanh" else "none")
        return a @ self[f"{part}.W_2"] + self[f"{part}.b_2"]
