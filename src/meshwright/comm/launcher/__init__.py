"""Processes of a run: their start, addresses, secret, state and console output.

launch          launch: start local ranks as processes, watch them, and end them together
reaper          script that ends the processes of a launcher that was killed
rank_console    printed lines of each rank, and detection of ranks in a debugger
slurm           torchrun's variables for a task that srun started
rendezvous      rank, addresses and key-value store of a process in its run
run_secret      secret that identifies the ranks of a run, and sealed values in the store
process_state   state of a process as the operating system reports it
"""
