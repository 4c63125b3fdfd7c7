"""Check the installed package without the checkout: a small model, the type marker, data files."""

from importlib.resources import files

import foretrace as ft

hmm = ft.HMM.random(num_states=8, vocab_size=50, eos_token_id=0, seed=0)
texts = hmm.sample(count=4, length=8, seed=1)
assert hmm.log_likelihood(texts).isfinite().all()
config = ft.FitConfig(objective="cross-entropy")
attribute = ft.Attribute.fit([[1, 2], [3, 4]] * 40, [0.9, 0.1] * 40, vocab_size=50, config=config)
eap = ft.Lookahead(hmm, ~attribute, horizon=4).eap(texts[0, :2], remaining=3)
assert ((eap >= 0) & (eap <= 1)).all()
assert files("foretrace").joinpath("py.typed").is_file()
assert files("foretrace.evaluate").joinpath("suites", "detox.yaml").is_file()
assert files("foretrace.cli").joinpath("explain_page.html").is_file()
assert "site-packages" in str(files("foretrace"))
print(ft.__version__, "works")
