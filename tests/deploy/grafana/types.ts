// SPDX-License-Identifier: Apache-2.0
// A dashboard as Grafana's schema types it, with the options of each kind of panel instead of "any record".
import type { Dashboard, DataQuery, FieldConfigSource, GraphFieldConfig, Panel, RowPanel, TableFieldOptions } from '@grafana/schema';
import type { Options as StatOptions } from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type { Options as TableOptions } from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type { Options as TimeSeriesOptions } from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// The package has no type for queries of the Prometheus data source; these are the fields it documents.
interface PrometheusQuery extends DataQuery {
  expr: string;
  editorMode?: 'code' | 'builder';
  format?: 'time_series' | 'table' | 'heatmap';
  instant?: boolean;
  interval?: string;
  legendFormat?: string;
  range?: boolean;
}

type Config<Custom> = Omit<FieldConfigSource, 'defaults'> & {
  defaults: Omit<FieldConfigSource['defaults'], 'custom'> & { custom?: Custom };
};

type Typed<Type extends string, Options, Custom> = Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> & {
  type: Type;
  options: Options;
  fieldConfig: Config<Custom>;
  targets: PrometheusQuery[];
};

// JSON holds the values of string enums, which TypeScript does not take for the enums.
type Plain<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T
  : T extends (infer Item)[] ? Plain<Item>[]
  : T extends object ? { [Key in keyof T]: Plain<T[Key]> } : T;

type AnyPanel =
  | Typed<'timeseries', TimeSeriesOptions, GraphFieldConfig>
  | Typed<'stat', StatOptions, never>
  | Typed<'table', Omit<TableOptions, 'frameIndex'>, TableFieldOptions>
  | (Omit<RowPanel, 'panels' | 'type'> & { type: 'row'; panels: [] });

export type TypedDashboard = Plain<Omit<Dashboard, 'panels'> & { uid: string; title: string; panels: AnyPanel[] }>;
