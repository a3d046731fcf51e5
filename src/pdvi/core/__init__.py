"""The contracts: model, problem, solver, executor, result. Read this first."""
