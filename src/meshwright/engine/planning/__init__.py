"""Plans that the search finds, applied to a model.

phases               plans of training and generation: a layout for each
auto                 `plan` and `auto`: choose the mesh and shardings of a model without marks
stage_distribution   distribute a model over the stages of a plan with a pipeline
suggest              turn a searched plan into code: styles by patterns of module names
unmarked             run a script without marks: plan each module at its first call
"""
