"""Comparison of ranks' calls, and errors for peers that cannot come.

check_settings    Check: which calls are compared, and the time limits
wait_timer        WaitTimer: time waited for peers, and the time of the next check
rank_facts        differences between two ranks that made one call for different values
peer_examiner     Examiner: an error if the awaited peers cannot come, a warning if they are slow
call_frames       PendingCallFrames: frames of this rank's calls and those of its peers
call_forecast     CallForecast: prediction of the next call from past calls
comparison_order  ComparisonOrder: choice of the calls that are compared behind their transfer
transfer_waits    TransferWaits: waits for peers in transfers that are not preceded by a comparison
one_caller        OneCaller: an error if two threads of a rank make collectives at once
call_guard        Guard: comparison of calls before a collective moves data
watchdog          Watchdog: thread that detects a peer that ended or stopped while data moves
"""
