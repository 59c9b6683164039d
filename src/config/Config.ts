// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The options of every section, each with its default, its bounds and its sentence; those of a
 * stage's own are declared by the stage. Pure.
 */
import * as Result from "effect/Result"
import * as Option from "./Option.ts"

/** An IPv4 or IPv6 address; the URL parser knows the grammar of both. */
const isAddress = (text: string): boolean =>
  text.includes(":")
    ? /^[0-9A-Fa-f:.]+$/.test(text) && URL.canParse(`http://[${text}]`)
    : /^\d{1,3}(\.\d{1,3}){3}$/.test(text) && text.split(".").every((part) => Number(part) < 256)

const address = (about: Option.About) =>
  Option.custom("an IPv4 or IPv6 address", "127.0.0.1", about, (value) =>
    isAddress(value) ? Result.succeed(value) : Result.fail("")
  )

const network = Option.custom("a network", "192.0.2.0/24", { doc: "" }, (value) => {
  const [base = "", bits, ...rest] = value.split("/")
  const most = base.includes(":") ? 128 : 32
  const length = bits === undefined || (/^\d{1,3}$/.test(bits) && Number(bits) <= most)
  return isAddress(base) && length && rest.length === 0 ? Result.succeed(value) : Result.fail("")
})

const nameServer = Option.custom("a name server", "127.0.0.1", { doc: "" }, (value) => {
  const [, host, port] = /^\[?([0-9A-Fa-f:.]+?)\]?(?::(\d{1,5}))?$/.exec(value) ?? []
  const plain = isAddress(value)
  const withPort = isAddress(host ?? "") && port !== undefined && Number(port) < 65536
  return plain || withPort ? Result.succeed(value) : Result.fail("")
})

/** Becomes the name of a directory: no blank, no slash, no dot in front. */
const mailbox = Option.custom("a mailbox", "dave", { doc: "" }, (value) =>
  /^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$/.test(value) ? Result.succeed(value) : Result.fail("")
)

const mailboxes = Option.listOf("mailboxes", mailbox, { doc: "" })

/** `[pepsi]`: what all parts share. */
export const pepsi = {
  HOSTNAME: Option.domain({
    doc: "The name of this host in greetings, Received and reports; others must find it.",
    default: "mail.pepsi.test"
  }),
  DOMAINS: Option.listOf("domain names", Option.domain({ doc: "" }), {
    doc: "The domains whose mail is delivered here.",
    default: "pepsi.test"
  }),
  USERS: Option.custom(
    "'any' or a list of mailboxes",
    "alice bob",
    {
      doc: "The mailboxes of each domain, besides postmaster and abuse; `any` = every name.",
      default: "any"
    },
    (value): Result.Result<"any" | ReadonlyArray<string>, string> =>
      value === "any" ? Result.succeed(value) : mailboxes.read(value)
  ),
  DELIMITER: Option.custom(
    "one of + - _ = . # or nothing",
    "+",
    {
      doc: "Separates a mailbox from a detail, as in dave+lists; nothing = no details.",
      default: "+"
    },
    (value) => (/^[-+_=.#]?$/.test(value) ? Result.succeed(value) : Result.fail(""))
  ),
  MYNETWORKS: Option.listOf("networks", network, {
    doc: "Networks of our own machines: limits per source do not hold for them.",
    default: "127.0.0.0/8 ::1"
  }),
  STATE_DIR: Option.file({
    doc: "Where all is kept that must survive: embedded database, sockets, generated keys.",
    default: "$PEPSI_HOME"
  }),
  LOG: Option.choice(["trace", "debug", "info", "warn", "error", "none"], {
    doc: "The least level that is logged, by every part and every worker.",
    default: "info"
  }),
  LOG_FORMAT: Option.choice(["logfmt", "json"], {
    doc: "How a line of the log is written.",
    default: "logfmt"
  }),
  ALLOW_FUSION: Option.yesNo({
    doc: "Stages run behind one another in one worker; `no` makes each a hop of its own.",
    default: "yes"
  }),
  AUTHSERV_ID: Option.optional(
    Option.domain({
      doc: "Our name in Authentication-Results (RFC 8601 section 2.5); not written = HOSTNAME."
    })
  ),
  MAX_HOPS: Option.int({
    min: 10,
    max: 1000,
    doc: "Mail with more Received fields is refused as looping (RFC 5321 section 6.3).",
    default: "50"
  }),
  RESOLVER: Option.listOf("name servers", nameServer, {
    doc: "Name servers, with `:PORT` if it is not 53; none = those of /etc/resolv.conf.",
    default: ""
  }),
  ENTRIES: {
    ...Option.listOf("stage sections", Option.section({ doc: "" }), {
      doc: "Further sections that mail is put into by other means than SMTP.",
      default: ""
    }),
    targets: (names: ReadonlyArray<string>) => names
  }
} as const

/** `[pepsi-postgres]`. */
export const postgres = {
  CONFIG: {
    ...Option.optional(
      Option.custom(
        "a database URL",
        "postgres:///pepsi",
        {
          doc: "The database to use; not written = an embedded cluster in STATE_DIR."
        },
        (value) => (/^postgres(ql)?:\/\/\S*$/.test(value) ? Result.succeed(value) : Result.fail(""))
      )
    ),
    secret: true // it may hold a password
  },
  WORKER_SYNCHRONOUS_COMMIT: Option.yesNo({
    doc: "Workers wait for the disk at each settle; else a crash repeats their last work.",
    default: "no"
  })
} as const

const poolSize = (text: string, doc: string) => Option.int({ min: 1, max: 256, default: text, doc })

/** `[pepsi-ingress]`: the SMTP server. */
export const ingress = {
  ADDRESS: address({
    doc: "The address to listen on; `0.0.0.0` and `::` are all.",
    default: "127.0.0.1"
  }),
  PORT: Option.int({
    min: 0,
    max: 65535,
    doc: "The port to listen on; 0 = any free one.",
    default: "2525"
  }),
  STAGE: Option.section({ doc: "The section that admitted mail begins in.", default: "init" }),
  MESSAGE_SIZE_LIMIT: Option.size({
    between: ["64 KiB", "100 MiB"], // RFC 5321 section 4.5.3.1.7; the database driver takes 128 MiB
    doc: "Larger messages are refused with 552.",
    default: "50M"
  }),
  RCPT_MAX: Option.int({
    min: 100, // RFC 5321 section 4.5.3.1.8
    max: 1000,
    doc: "More recipients of one message are put off with 452.",
    default: "200"
  }),
  MAX_CONNECTIONS: Option.int({
    min: 1,
    max: 65535,
    doc: "Connections at a time; more are put off with 421.",
    default: "256"
  }),
  MAX_CONNECTIONS_PER_SOURCE: Option.int({
    min: 1,
    max: 65535,
    doc: "Connections at a time from one source: an IPv4 address or an IPv6 /64.",
    default: "8"
  }),
  CONN_RATE_PER_SECOND: Option.int({
    min: 1,
    max: 1_000_000,
    doc: "New connections each second from one source; not enforced by this version.",
    default: "1"
  }),
  CONN_RATE_BURST: Option.int({
    min: 1,
    max: 1_000_000,
    doc: "New connections from one source at once; not enforced by this version.",
    default: "1"
  }),
  DB_POOL_SIZE: poolSize("1", "Database connections of the SMTP server."),
  ADMIT_BATCH: Option.int({
    min: 1,
    max: 64,
    doc: "Messages admitted in one transaction at most.",
    default: "64"
  }),
  MEMORY_BUDGET: Option.size({
    between: ["1 MiB", "64 GiB"],
    doc: "Octets of mail held in memory before admission; beyond it new mail is put off with 452.",
    default: "256 MiB"
  }),
  TLS_CERT: Option.optional(
    Option.file({
      doc: "Certificate chain in PEM for STARTTLS; not written = a certificate of our own making."
    })
  ),
  TLS_KEY: Option.optional(Option.file({ doc: "The private key of TLS_CERT in PEM." })),
  TIMEOUT: Option.duration({
    between: ["1 s", "1 h"],
    doc: "A client is waited for so long between commands (RFC 5321 section 4.5.3.2.7).",
    default: "300 s"
  }),
  SESSION_MAX: Option.duration({
    between: ["1 s", "1 d"],
    doc: "A connection lasts so long at most, whatever it does.",
    default: "30 min"
  }),
  GRACE: Option.duration({
    between: ["0 s", "10 min"],
    doc: "At shutdown a message that is being received may take so long to finish.",
    default: "30 s"
  })
} as const

/** `[pepsi-dispatch]`: who runs what. */
export const dispatch = {
  DB_POOL_SIZE: poolSize("8", "Database connections of the dispatcher."),
  WORKER_IDLE_TIMEOUT: Option.duration({
    between: ["100 ms", "1 d"],
    doc: "A worker without work ends after this time.",
    default: "5 s"
  }),
  POLL_INTERVAL: Option.duration({
    between: ["100 ms", "1 h"],
    doc: "The queue is looked through this often; bounds what a lost wake-up costs.",
    default: "5 s"
  }),
  STATS_INTERVAL: Option.duration({
    between: ["100 ms", "1 h"],
    doc: "Statistics are written this often, when the queue goes idle, and at shutdown.",
    default: "10 s"
  }),
  FAIR_SCHEDULING: Option.yesNo({
    doc: "Waiting senders take turns; `no` hands mail out in the order of its arrival.",
    default: "yes"
  }),
  MAX_INFLIGHT: Option.size({
    between: ["1 MiB", "64 GiB"],
    doc: "Octets of mail that all workers together have in hand at most.",
    default: "256 MiB"
  }),
  BATCH: Option.size({
    between: ["64 KiB", "512 MiB"],
    doc: "Octets of mail handed to a worker at once at most; a larger message goes alone.",
    default: "32 MiB"
  })
} as const

/** `[pepsi-httpd]`. */
export const httpd = {
  DB_POOL_SIZE: poolSize("1", "Database connections of the web server, which this version lacks.")
} as const

/** `[pepsi-telemetry]`. */
export const telemetry = {
  DB_POOL_SIZE: poolSize("2", "Database connections of telemetry, which this version lacks.")
} as const

/** The options of every `[stage-NAME]`; `cpus` of this machine are the default of PARALLELISM. */
export const stage = (cpus: number) => ({
  PROGRAM: Option.text({ doc: "The stage that runs here.", example: "local" }),
  NEXT: Option.optional(Option.section({ doc: "The section that takes over what passed." })),
  FAILURE: Option.optional(
    Option.section({
      doc: "The section that takes what failed; not written = it is kept, with status failed."
    })
  ),
  PARALLELISM: Option.int({
    min: 1,
    max: 256,
    doc: "Worker processes at most, each with one database connection.",
    default: String(cpus),
    example: "4"
  }),
  QUEUE_LIMIT: Option.int({
    min: 1,
    max: 1024,
    doc: "Messages handed to one worker at a time, which it runs side by side.",
    default: "64"
  }),
  FUSION: Option.optional(
    Option.yesNo({
      doc: "May run behind another stage in its worker; not written = if the stage can."
    })
  ),
  TIMEOUT: Option.duration({
    between: ["1 s", "1 d"],
    doc: "Wall time of one message; then its worker is killed and counted as crashed.",
    default: "300 s"
  }),
  SYNCHRONOUS_COMMIT: Option.choice(["inherit", "yes", "no"], {
    doc: "Settles wait for the disk; `inherit` = WORKER_SYNCHRONOUS_COMMIT of [pepsi-postgres].",
    default: "inherit"
  })
})

/** The sections that are no stages, by name. */
export const sections = {
  pepsi: pepsi,
  "pepsi-postgres": postgres,
  "pepsi-ingress": ingress,
  "pepsi-dispatch": dispatch,
  "pepsi-httpd": httpd,
  "pepsi-telemetry": telemetry
} as const

/**
 * Options whose default serves a trial only. A file that leaves them out is told so: mail for a
 * real name would be refused, or accepted for everybody.
 */
export const trial: ReadonlyArray<string> = ["HOSTNAME", "DOMAINS", "USERS"]

export type Pepsi = Option.Values<typeof pepsi>
export type Postgres = Option.Values<typeof postgres>
export type Ingress = Option.Values<typeof ingress>
export type Dispatch = Option.Values<typeof dispatch>
