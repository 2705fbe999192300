"""Static programs of a model: built, run, and saved for later processes.

to_static            `to_static` and `DistModel`: a model whose steps run as programs
program_builder      capture a call, lay it out, record it, and run all passes
replayed_step        training steps that a device replays as one graph
pipeline_step        the stages, the schedule and the step of a static pipeline
pieces               run a model with graph breaks: captured modules as programs, the rest as Python
piece_call           run the programs of one module as one differentiable function
piece_checks         refuse inputs and outputs with which a module cannot run as a program
whole_step_options   refuse options that need the whole step as one program
program_files        save programs in a folder, and load them again
program_index        the index that each rank writes into a folder of programs
program_cache        cache programs on disk, so that a later start records nothing
"""
