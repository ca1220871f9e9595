package main

// benchHelp is the help of tuner bench. It groups the flags, because nobody reads a list of so many.
const benchHelp = `NAME:
   tuner bench - send a load to a running server and measure its answers

USAGE:
   tuner bench --url URL --rate R,… | --concurrency N,… [options]

   Works with any OpenAI-compatible server. Latencies count from when a request
   was due, and its own lateness is measured and printed beside them. Ctrl-C
   ends it; the runs that were printed stand.

EXAMPLES:
   tuner bench --url http://127.0.0.1:8000 --rate 2
   tuner bench --url http://127.0.0.1:8000 --workload sharegpt \
       --path ShareGPT.json --rate 1:8:1 --slo 'p99 ttft <= 1000ms'
   tuner bench --url http://127.0.0.1:8000 --concurrency 1,2,4,8,16 -o csv
   tuner bench --url http://127.0.0.1:8000 --find-capacity \
       --slo 'p99 ttft <= 1000ms, p99 tpot <= 60ms' --precision 5%

SERVER:
   --url URL            base URL, such as http://127.0.0.1:8000
   --model NAME         served model (default: the server's first)
   --endpoint NAME      completions or chat (default: completions)
   --api-key-file FILE  holds the API key; without it OPENAI_API_KEY does
   --header 'NAME: V'   sent with each request; may be repeated
   --ca-file FILE       certificates of the server's authority, PEM
   --insecure           do not check the server's certificate
   --proxy URL          HTTP proxy; those of the environment are not used
   --idle-timeout TIME  an answer without a byte for so long has failed (1m)
   --answer-limit TIME  an answer may take so long as a whole, and the last ones
                        once all requests are due (10m)

WHAT IS ASKED:
   --workload KIND      random (default), phase1, production, sharegpt, jsonl,
                        prefix-repetition, shared-prefix, trace or capture
   --path FILE          of sharegpt, jsonl, trace and capture
   --layout NAME        of a trace file, where it is not recognised
   --input-tokens N     mean prompt length
   --output-tokens N    answer length: the mean, or every one of a file's
   --range-ratio R      lengths from (1-R) to (1+R) times the mean, 0 to 1
   --prefix-tokens N    length of a shared prefix
   --prefixes N         number of prefixes of prefix-repetition
   --suffix-tokens N    length of what follows them
   --hit-percent P      part of a prompt that shared-prefix shares
   --groups N           groups of requests that share a prefix
   --vocab-size N       token ids stay below it
   --repeat salt|error  what a file shorter than the run does (repeat as it is)
   --skip-bad-rows      count bad rows of a file instead of refusing it
   --natural            answers end where the model ends them: not comparable
   --seed N             of requests and arrivals (1)

WHEN, AND FOR HOW LONG:
   --rate R,…           open loop: requests per second; also FROM:TO:STEP
   --concurrency N,…    closed loop: so many requests are always in flight
   --max-concurrency N  at a rate: more than N in flight wait in the client
   --arrivals KIND      poisson (default), constant; trace: gaps of a file at
                        the rate; replay: as recorded in the file
   --burstiness B       gamma arrivals; 1 is Poisson, larger is smoother (1)
   --trace FILE         whose times are used (default: --path)
   --speed S            replay S times as fast (1)
   --rescale            as vllm bench serve: N requests in exactly N/rate,
                        without lead-in and run-out
   --ramp-up KIND       linear or exponential, over all requests
   --ramp-from R        first rate of the ramp
   --ramp-to R          last rate of the ramp
   --live               conversations with real answers; rates are sessions/s
   --think-time TIME    mean pause before the next turn (5s)
   --requests N         at least so many counted requests (300; in a closed
                        loop 10 for each stream and at least 30)
   --seconds S          and a window of at least so many seconds
   --lead-in TIME       load before the window, not counted (5s; in a search
                        4 times what an answer may take, 60s to 5m; with
                        --reset-cache twice, 30s to 2m30s)
   --reset-cache        empty the server's prefix cache before each run; vLLM
                        needs VLLM_SERVER_DEV_MODE=1
   --no-run-out         no load after the window: the last requests then see
                        a falling load, as in vllm bench serve

WHAT IS MADE OF IT:
   --slo LIMIT,…        such as 'p99 ttft <= 1000ms': a verdict on each run;
                        exit code 4 when no run keeps it
   --goodput M:MS,…     as vllm bench serve: ttft:1000 tpot:50 (ms)
   --find-capacity      search the highest rate that keeps --slo, from --rate
                        on, with its 95 % interval and a rate to run at; runs
                        of 2m unless --seconds or --requests says otherwise
   --tolerance T        of the bracket between passing and failing rates:
                        highest/lowest - 1 (0.2)
   --precision P        then go on until the capacity is known to ±P: 5% or
                        0.05
   --budget TIME        no run begins that would exceed it (2h)
   --max-rate R         the search goes no higher (100000)
   --margin M           the advised rate is this part of the lower end of the
                        interval (0.9)
   --no-prime           do not send the workload once before a search, to fill
                        the prefix cache
   --rules VERSION      vLLM's definitions where they differ: 0.33 or 0.14.1
   -o, --output FORMAT  text, csv, yaml or json (vLLM's field names)
   --result-file FILE   vLLM's result JSON, one line a run
   --append             add to that file instead of replacing it
   --detailed           the JSON has lists of the single requests too
   --metadata K=V,…     put into the result JSON, as vllm bench serve does
   --quiet              no progress on standard error

See also: docs/bench.md
`
