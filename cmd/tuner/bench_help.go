package main

// benchHelp is the help of tuner bench. It groups the flags, because a flat list of 60 is hard to read.
const benchHelp = `NAME:
   tuner bench - send a load to a running server and measure its answers

USAGE:
   tuner bench --url URL --rate R,… | --concurrency N,… [options]

   Works with any OpenAI-compatible server. A latency counts from the moment
   the request was due. The report also says how late requests were sent.
   Ctrl-C ends the current run; runs that are already printed stay valid.

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
   --api-key-file FILE  file with the API key (default: $OPENAI_API_KEY)
   --header 'NAME: V'   send this header with each request; may be repeated
   --ca-file FILE       PEM file of the authority that signed the server's
                        certificate
   --insecure           do not check the server's certificate
   --proxy URL          HTTP proxy; HTTP_PROXY and the like are not used
   --idle-timeout TIME  a request fails after this time without a byte (1m)
   --answer-limit TIME  a request fails after this time in all; a run ends this
                        time after its last request was due (10m)

REQUESTS:
   --workload KIND      random (default), phase1, production, sharegpt, jsonl,
                        prefix-repetition, shared-prefix, trace or capture
   --path FILE          file that sharegpt, jsonl, trace and capture read
   --layout NAME        layout of a trace file, if it is not recognised
   --input-tokens N     mean prompt length
   --output-tokens N    mean answer length; with a file, every answer's length
   --range-ratio R      lengths from (1-R) to (1+R) times the mean, 0 to 1
   --prefix-tokens N    length of a shared prefix
   --prefixes N         number of prefixes of prefix-repetition
   --suffix-tokens N    length of the text after a prefix
   --hit-percent P      percentage of a prompt that shared-prefix shares
   --groups N           groups of requests that share a prefix
   --vocab-size N       token ids are below N
   --repeat salt|error  a file shorter than the run is repeated with a salt, or
                        refused (default: repeated unchanged)
   --skip-bad-rows      count bad rows of a file instead of refusing it
   --natural            let the model end its answers; such runs are not
                        comparable
   --seed N             seed of requests and arrivals (1)

LOAD:
   --rate R,…           open loop: requests per second; also FROM:TO:STEP
   --concurrency N,…    closed loop: N requests are always in flight
   --max-concurrency N  with --rate: at most N in flight; more wait here
   --arrivals KIND      poisson (default) or constant; trace: gaps from a file,
                        scaled to the rate; replay: times as in the file
   --burstiness B       gamma arrivals; 1 is Poisson, larger is smoother (1)
   --trace FILE         file with the times (default: --path)
   --speed S            replay S times as fast (1)
   --rescale            send N requests in exactly N/rate seconds, without
                        lead-in and run-out, as vllm bench serve does
   --ramp-up KIND       raise the rate over all requests: linear or exponential
   --ramp-from R        first rate of the ramp
   --ramp-to R          last rate of the ramp
   --live               conversations with real answers; rates are sessions/s
   --think-time TIME    mean pause before the next turn (5s)
   --requests N         count at least N requests (300; in a closed loop 10 for
                        each stream and at least 30)
   --seconds S          and count for at least S seconds
   --lead-in TIME       load before the counted window (5s; in a search 4 times
                        the longest answer within the SLO, 60s to 5m; with
                        --reset-cache 2 times, 30s to 2m30s)
   --reset-cache        empty the server's prefix cache before each run; vLLM
                        needs VLLM_SERVER_DEV_MODE=1
   --no-run-out         no load after the window: the last requests then see
                        a falling load, as in vllm bench serve

RESULTS:
   --slo LIMIT,…        judge each run by limits such as 'p99 ttft <= 1000ms';
                        exit code 4 when no run keeps them
   --goodput M:MS,…     limits in ms, as vllm bench serve: ttft:1000 tpot:50
   --find-capacity      search the highest rate that keeps --slo, beginning at
                        --rate; print it with its 95 % interval and a rate to
                        run at; a run takes 2m without --seconds or --requests
   --tolerance T        narrow the search until the lowest failing rate is at
                        most 1+T times the highest passing one (0.2)
   --precision P        then go on until the capacity is known to ±P: 5% or
                        0.05
   --budget TIME        begin no run that would end after this time (2h)
   --max-rate R         try no rate above R (100000)
   --margin M           advise M times the lower end of the interval (0.9)
   --no-prime           do not send the workload once before a search to fill
                        the prefix cache
   --rules VERSION      compute figures as vLLM 0.33 or 0.14.1 does (0.33)
   -o, --output FORMAT  text, csv, yaml or json (vLLM's field names)
   --result-file FILE   write vLLM's result JSON, one line for each run
   --append             add to that file instead of replacing it
   --detailed           list every request in the JSON
   --metadata K=V,…     add to the result JSON, as vllm bench serve does
   --quiet              no progress on standard error

See also: docs/bench.md
`
