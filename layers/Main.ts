// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * What runs in a process, put together: the daemon, a worker, and what commands need. Composition
 * only; each part is decided where it is written.
 */
import * as NodeFileSystem from "@effect/platform-node/NodeFileSystem"
import type * as Cause from "effect/Cause"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import type * as EffectQueue from "effect/Queue"
import * as Schema from "effect/Schema"
import * as SecureRandom from "effect/crypto/SecureRandom"
import * as Dispatcher from "../src/daemon/Dispatcher.ts"
import * as Ingress from "../src/daemon/Ingress.ts"
import * as StatsFlusher from "../src/daemon/StatsFlusher.ts"
import * as Worker from "../src/daemon/Worker.ts"
import * as Wire from "../src/pipeline/Wire.ts"
import { Accounts } from "../src/services/Accounts.ts"
import { Configuration, ConfigurationInvalid } from "../src/services/Configuration.ts"
import { DatabaseUnfit } from "../src/services/DatabaseError.ts"
import type { EmbeddedPostgresError } from "../src/services/DatabaseError.ts"
import { MailAuth } from "../src/services/MailAuth.ts"
import { Mailbox } from "../src/services/Mailbox.ts"
import type { Stages } from "../src/services/Stages.ts"
import type { Transport } from "../src/services/Transport.ts"
import { registry } from "../stages/index.ts"
import { AccountsConfig } from "./AccountsConfig.ts"
import * as Certificate from "./Certificate.ts"
import * as ConfigIni from "./ConfigIni.ts"
import * as ControlSocket from "./ControlSocket.ts"
import { DnsNode } from "./DnsNode.ts"
import * as EmbeddedPostgres from "./EmbeddedPostgres.ts"
import * as Log from "./Log.ts"
import { MailAuthMailauth } from "./MailAuthMailauth.ts"
import { MailboxMaildir } from "./MailboxMaildir.ts"
import * as Migrations from "./Migrations.ts"
import { OwnershipPg } from "./OwnershipPg.ts"
import * as Postgres from "./Postgres.ts"
import type { Server } from "./PostgresAddress.ts"
import * as PostgresSession from "./PostgresSession.ts"
import { QueuePg } from "./QueuePg.ts"
import { SmtpServerNodemailer } from "./SmtpServerNodemailer.ts"
import * as StagesRegistry from "./StagesRegistry.ts"
import { TransportSmtp } from "./TransportSmtp.ts"
import { WorkersProcess } from "./WorkersProcess.ts"

type Config = Configuration["Service"]

// Commands

/** The configuration of `-c FILE`, or what is found without it. Runs no stage. */
export const configuration = (file: string | undefined) =>
  ConfigIni.fromFile(file).pipe(
    Layer.provide(StagesRegistry.names(registry)),
    Layer.provide(NodeFileSystem.layer)
  )

/** What is logged before the configuration is known: warnings. */
export const earlyLog = Log.early

/** How the program logs under a configuration. */
export const log = ({ pepsi }: Config): Layer.Layer<never> =>
  Log.layer(pepsi.LOG_FORMAT, Log.level(pepsi.LOG))

// Database

/** The server that CONFIG names, or our own in the state directory, started if need be. */
const databaseServer = (
  { pepsi, postgres }: Config,
  stopAdopted: boolean
): Layer.Layer<DatabaseServer, EmbeddedPostgresError | DatabaseUnfit> =>
  postgres.CONFIG === undefined
    ? Layer.effect(
        DatabaseServer,
        Effect.map(EmbeddedPostgres.EmbeddedPostgres, (embedded) => embedded.server)
      ).pipe(Layer.provide(EmbeddedPostgres.layer({ directory: pepsi.STATE_DIR, stopAdopted })))
    : Layer.effect(DatabaseServer, Postgres.serverOf(postgres.CONFIG))

class DatabaseServer extends Context.Service<DatabaseServer, Server>()(
  "pepsi/layers/Main/DatabaseServer"
) {}

/** A pool of its own each time it is called. */
const pool = (options: Omit<Postgres.Options, "server">) =>
  Layer.unwrap(Effect.map(DatabaseServer, (server) => Postgres.layer({ ...options, server })))

/** The database for commands that may find it empty; a daemon that runs is left alone. */
export const anyDatabase = (config: Config) =>
  pool({ applicationName: "pepsi command", maxConnections: 1, synchronousCommit: true }).pipe(
    Layer.provide(databaseServer(config, false))
  )

/** What commands look into the queue with: there must be one. */
export const database = (config: Config) =>
  Layer.effectDiscard(hasQueue(config)).pipe(
    Layer.provideMerge(QueuePg),
    Layer.provideMerge(anyDatabase(config)),
    Layer.provide(Layer.effectDiscard(hasCluster(config)))
  )

const noQueue = (what: string) =>
  new DatabaseUnfit({
    reason: "missing",
    detail: `${what}: start 'pepsi serve' once, or run 'pepsi db migrate'`,
    cause: undefined
  })

/** A command that only looks makes no database. */
const hasCluster = ({ pepsi, postgres }: Config) =>
  Effect.suspend(() =>
    postgres.CONFIG === undefined && !EmbeddedPostgres.isMade(pepsi.STATE_DIR)
      ? Effect.fail(noQueue(`there is no queue in ${pepsi.STATE_DIR}`))
      : Effect.void
  )

const hasQueue = ({ pepsi }: Config) =>
  Effect.flatMap(Migrations.status, ({ missing }) =>
    missing.length === 0
      ? Effect.void
      : Effect.fail(noQueue(`the queue of ${pepsi.HOSTNAME} is not what this program needs`))
  )

export const migrate = Migrations.migrate
export const migrationStatus = Migrations.status

/** Hands mail to the SMTP server of a configuration, as `pepsi send` and the benchmarks do. */
export const transport = ({ ingress, pepsi }: Config): Layer.Layer<Transport> =>
  TransportSmtp({
    // What listens everywhere is reached on this host.
    host:
      ingress.ADDRESS === "0.0.0.0"
        ? "127.0.0.1"
        : ingress.ADDRESS === "::"
          ? "::1"
          : ingress.ADDRESS,
    port: ingress.PORT,
    hostname: pepsi.HOSTNAME,
    timeout: Duration.seconds(60)
  })

// Handing over

/** All that stages may ask for; a stage that asks for more does not compile. */
type Provided = Accounts | Mailbox | MailAuth
const stageRegistry: StagesRegistry.Registry<Provided> = registry

/**
 * What a daemon tells a worker with its first line: the configuration, and where the database is.
 */
const Handed = Schema.fromJsonString(
  Schema.Struct({
    text: Schema.String,
    server: Schema.Struct({
      host: Schema.String,
      port: Schema.Int,
      database: Schema.String,
      username: Schema.String,
      password: Schema.optionalKey(Schema.Redacted(Schema.String)),
      tls: Schema.optionalKey(Schema.Literals(["encrypted", "verified"]))
    })
  })
)

const encodeHanded = Schema.encodeSync(Handed)

/** As the wire quotes it, and with room for the rest of its line. */
const handedText = Effect.fnUntraced(function* ({ text, ...config }: Config, server: Server) {
  const handed = encodeHanded({ text, server })
  if (JSON.stringify(handed).length < Wire.maxLine - 1024) return handed
  const where = config.diagnostics[0]?.origin?.file ?? "configuration"
  return yield* new ConfigurationInvalid({
    messages: [`${where}: all of it together is larger than a worker can be told`]
  })
})

// Daemon

/** How a daemon is run. */
export interface Daemon {
  readonly config: Config
  /** The program and its arguments, for starting workers. */
  readonly command: readonly [string, ...Array<string>]
}

/** A worker may finish what it has begun; a message of 50 MB takes some seconds. */
const workerGrace = Duration.seconds(10)
/** Then it is told to end; it has had its time. */
const endGrace = Duration.seconds(1)

const dispatcher = ({ command, config }: Daemon) =>
  Layer.unwrap(
    Effect.map(
      DatabaseServer.pipe(Effect.flatMap((server) => handedText(config, server))),
      (text) =>
        Dispatcher.layer({
          pipeline: config.pipeline,
          configuration: text,
          grace: workerGrace,
          idleTimeout: config.dispatch.WORKER_IDLE_TIMEOUT,
          pollInterval: config.dispatch.POLL_INTERVAL,
          fair: config.dispatch.FAIR_SCHEDULING,
          batchBytes: config.dispatch.BATCH,
          maxInFlightBytes: config.dispatch.MAX_INFLIGHT,
          owner: `${config.pepsi.HOSTNAME} ${process.pid}`
        })
    )
  ).pipe(Layer.provide(WorkersProcess({ command, grace: endGrace })))

const tls = (config: Config) => {
  const { TLS_CERT: cert, TLS_KEY: key } = config.ingress
  return cert !== undefined && key !== undefined
    ? Certificate.load({ cert, key })
    : Certificate.selfSigned({ directory: config.pepsi.STATE_DIR, hostname: config.pepsi.HOSTNAME })
}

const accounts = ({ pepsi }: Config): Layer.Layer<Accounts> =>
  AccountsConfig({ domains: pepsi.DOMAINS, delimiter: pepsi.DELIMITER, localParts: pepsi.USERS })

/** Octets of a header block, of a line, of an admission (mail specification 1.1). */
const headerBytes = 256 * 1024
const lineBytes = 64 * 1024
const batchBytes = 8 * 1024 * 1024

/**
 * What one source may cost (mail specification 1.1 to 1.5). A quarter of connections and memory: to
 * shut everybody else out takes four of them.
 */
const sourceShare = 0.25
/** Errors of a session; a sender that means well makes a few, with a list of old addresses more. */
const errors = 15
/** Between two messages a client has use for one or two. */
const idleCommands = 100
/** A mistyped name is told at once; who tries names is held to one in two seconds. */
const unknownRecipients = 2
const unknownDelay = Duration.seconds(2)

const ingress = (config: Config) => {
  const { ingress: options, pepsi } = config
  return Layer.unwrap(
    Effect.map(tls(config), (certificate) =>
      Ingress.layer({
        hostname: pepsi.HOSTNAME,
        postmaster: `postmaster@${pepsi.DOMAINS[0] ?? pepsi.HOSTNAME}`,
        listeners: [{ name: "mx", address: options.ADDRESS, port: options.PORT }],
        tls: certificate,
        section: options.STAGE,
        headerBytes,
        maxHops: pepsi.MAX_HOPS,
        batchRows: options.ADMIT_BATCH,
        batchBytes,
        commits: options.DB_POOL_SIZE,
        limits: {
          messageBytes: options.MESSAGE_SIZE_LIMIT,
          lineBytes,
          recipients: options.RCPT_MAX,
          connections: options.MAX_CONNECTIONS,
          connectionsPerSource: options.MAX_CONNECTIONS_PER_SOURCE,
          exempt: pepsi.MYNETWORKS,
          sourceShare,
          memoryBytes: options.MEMORY_BUDGET,
          commandTimeout: options.TIMEOUT,
          dataTimeout: Duration.seconds(180),
          minBytesPerSecond: 500,
          handshakeTimeout: Duration.seconds(30),
          sessionTimeout: options.SESSION_MAX,
          errors,
          idleCommands,
          unknownRecipients,
          unknownDelay,
          stopGrace: options.GRACE
        }
      })
    )
  ).pipe(
    Layer.provide(SmtpServerNodemailer),
    Layer.provide(accounts(config)),
    Layer.provide(SecureRandom.layerWebCrypto),
    // Admission has connections of its own: a busy dispatcher lets no client wait.
    Layer.provide(
      Layer.fresh(QueuePg).pipe(
        Layer.provide(
          pool({
            applicationName: "pepsi ingress",
            maxConnections: options.DB_POOL_SIZE,
            synchronousCommit: true
          })
        )
      )
    )
  )
}

/** The whole daemon: each part is started when those below it are, and stopped before them. */
export const daemon = (self: Daemon) => {
  const { config } = self
  return ingress(config).pipe(
    Layer.provideMerge(dispatcher(self)),
    Layer.provideMerge(
      StatsFlusher.layer({
        interval: config.dispatch.STATS_INTERVAL,
        dispatcher: config.pepsi.HOSTNAME
      })
    ),
    Layer.provideMerge(Layer.mergeAll(QueuePg, OwnershipPg)),
    Layer.provideMerge(Layer.effectDiscard(Migrations.migrate)),
    Layer.provideMerge(
      pool({
        applicationName: "pepsi dispatcher",
        maxConnections: config.dispatch.DB_POOL_SIZE,
        synchronousCommit: true
      })
    ),
    Layer.provideMerge(databaseServer(config, true)),
    Layer.provideMerge(ControlSocket.layer(config.pepsi.STATE_DIR))
  )
}

/** What a daemon that runs can say of itself. */
export interface Running {
  readonly listeners: ReadonlyArray<{ readonly address: string; readonly port: number }>
  /** Where the database is, for people. */
  readonly database: string
}

export const running = Effect.gen(function* () {
  const { listeners } = yield* Ingress.Ingress
  const { database, host, port } = yield* DatabaseServer
  return {
    listeners,
    database: `${database} at ${host}${host.startsWith("/") ? "" : ` port ${port}`}`
  } as Running
})

// Worker

/** One stage worker. Returns false when a stage threw; everything begun is settled by then. */
export const worker = Effect.fn("Main.worker")(function* (
  order: typeof Wire.SetUp.Type,
  talk: {
    readonly orders: EffectQueue.Dequeue<Wire.Order, Wire.WireError | Cause.Done>
    readonly say: (report: Wire.Report) => void
  }
) {
  const { server, text } = yield* Schema.decodeEffect(Handed)(order.configuration)
  const reading = ConfigIni.fromText(text).pipe(Layer.provide(StagesRegistry.names(registry)))
  const config = yield* Effect.provide(Configuration, reading)
  const section = config.pipeline.sections.get(order.section)
  if (section === undefined) return yield* Effect.die(new Error(`no section ${order.section}`))
  const session = PostgresSession.layer({
    server,
    applicationName: `pepsi worker ${order.section}`,
    synchronousCommit: false
  })
  return yield* Worker.run({
    section,
    pipeline: config.pipeline,
    allowFusion: config.pepsi.ALLOW_FUSION,
    pid: process.pid,
    ...talk
  }).pipe(
    Effect.scoped,
    Effect.provide(
      Layer.mergeAll(
        Layer.mergeAll(QueuePg, OwnershipPg).pipe(Layer.provide(session)),
        stages(config),
        log(config)
      )
    )
  )
})

/** The stages with the services they may ask. */
const stages = (config: Config): Layer.Layer<Stages> => {
  const { pepsi } = config
  return StagesRegistry.layer(stageRegistry, {
    [Accounts.key]: accounts(config),
    [Mailbox.key]: MailboxMaildir({ host: pepsi.HOSTNAME }),
    [MailAuth.key]: MailAuthMailauth({
      hostname: pepsi.HOSTNAME,
      authservId: pepsi.AUTHSERV_ID,
      keyDirectory: pepsi.STATE_DIR
    }).pipe(Layer.provide(DnsNode({ servers: pepsi.RESOLVER })))
  })
}
