"""`stretto bench`: the commands behind every figure in the README and the docs."""

import typer

from stretto.cli.bench import checkouts, collectives, operators, training

app = typer.Typer(no_args_is_help=True, help="Measure what the README claims, peers beside it in the same run.")
app.command()(training.train)
app.command()(training.parity)
app.command("compile")(collectives.compile_)
app.command()(training.published)
app.command()(training.peers)
app.command()(training.overlap)
app.command()(training.plan)
app.command()(collectives.collectives)
app.command()(collectives.ablations)
app.command()(operators.embedding)
app.command()(operators.ops)
app.command("two-level")(collectives.two_level)
app.command()(training.dlrm)
app.command()(checkouts.checkouts)
